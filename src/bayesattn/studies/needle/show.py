"""RULER's tasks as tables, a picture, and a section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from bayesattn.drawing import html
from bayesattn.files import short_name
from bayesattn.studies.needle.run import Needles
from bayesattn.studies.retrieval_show import accuracy_figure, cells_table, curves


def tables(result: Needles) -> list[Table | str]:
    end = f"mean share of answers found, greedy generation, seed {result.settings['seed']}"
    return [
        cells_table(cells, result.train_length, f"{short_name(result.model)}: {task}, {end}")
        for task, cells in result.by_task.items()
    ]


def figures(result: Needles, folder: Path) -> list[Path]:
    return accuracy_figure(result.by_task, result.train_length, folder / "needle", "mean share of answers found")


def sections(results: Sequence[Needles]) -> list[html.Section]:
    """A chart for each task. A task that is in several files with the same results is shown once."""
    groups: dict[str, list[Needles]] = {}
    for result in results:
        for task, cells in result.by_task.items():
            one = Needles(
                model=result.model,
                train_length=result.train_length,
                settings={"seed": result.settings["seed"]},
                cells=[replace(cell, task=None) for cell in cells],
            )
            group = groups.setdefault(task, [])
            if one not in group:
                group.append(one)
    about = (
        "Mean share of answers found, greedy generation. Where a task has several answers, intervals are wider than "
    )
    parts = [html.paragraph(f"{about}they need be.", soft=True)]
    parts += [
        curves(task, group, "mean share found", "Mean share of answers found", "found")
        for task, group in groups.items()
    ]
    return [html.Section("needles", "Needles among needles", html.joined(parts))]
