"""Slow-downs beside another process, and trainings side by side, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from bayesattn.drawing.tables import duration, make_table
from bayesattn.studies.bench.load.run import Beside, Load, Trainings


def tables(result: Load) -> list[Table | str]:
    parts: list[Table | str] = [_beside_table(result.attention, result.settings["shape"])]
    return [*parts, _trainings_table(result.trainings)] if result.trainings else parts


def _beside_table(rows: Sequence[Beside], shape: str) -> Table:
    """Methods down: how much slower they are beside another process that trains."""
    table = make_table(
        title=f"forward + backward at {shape} beside another training: times the time alone",
        caption="medians and ranges of the tries; neighbour: speed of the other process, as a share of its speed alone",
    )
    for name in ("", "alone", "beside", "slow-down", "range", "slowest", "neighbour"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        slow_downs = [row.slow_down for row in of_method if row.slow_down is not None]
        if not slow_downs:
            table.add_row(method, of_method[0].note)
            continue
        alone, beside, others = (
            statistics.median(getattr(row, field) or 0.0 for row in of_method)
            for field in ("alone", "beside", "neighbour")
        )
        table.add_row(
            method,
            duration(alone),
            duration(beside),
            f"{statistics.median(slow_downs):.1f}×",
            f"{min(slow_downs):.1f} … {max(slow_downs):.1f}",
            duration(max(row.longest or 0.0 for row in of_method)),
            f"{others:.0%}",
        )
    return table


def _trainings_table(rows: Sequence[Trainings]) -> Table:
    """Models down: the speed of two trainings side by side, each as a share of its speed alone."""
    table = make_table(
        title="two trainings side by side: the speed of each, as a share of its speed alone",
        caption="spread: the fastest training of any try over the slowest",
    )
    for name in ("", "steps/s alone", "share", "range", "spread"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        shares = [share for row in of_model for share in row.shares]
        speed = statistics.median(speed for row in of_model for speed in row.steps_per_second)
        table.add_row(
            model,
            f"{speed:.2f}",
            f"{statistics.median(shares):.2f}",
            f"{min(shares):.2f} … {max(shares):.2f}",
            f"{spread(of_model):.1f}×",
        )
    return table


def spread(rows: Sequence[Trainings]) -> float:
    """Side by side, the speed of the fastest training of any try over that of the slowest."""
    speeds = [speed * share for row in rows for speed, share in zip(row.steps_per_second, row.shares, strict=True)]
    return max(speeds) / min(speeds)
