"""Measurements that are saved in a file step by step. Stop the iteration, and it is as if the run had been stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayesattn.evaluation.cells import Cell
from bayesattn.studies.needle import run as needle
from bayesattn.studies.passkey import run as passkey
from bayesattn.studies.perplexity import run as perplexity
from bayesattn.studies.perplexity.run import Perplexity
from bayesattn.studies.runner import Saved
from bayesattn.studies.study import Result, Study


def steps(
    study: Study[Any, Any],
    measure: Callable[..., Iterator[Result]],
    file: Path,
    *arguments: Any,
    command: str = "",
    budget: float | None = None,
    **options: Any,
) -> Iterator[Any]:
    """The results of a measurement, each after it is saved."""
    progress: Saved[Any] = Saved(study, file, command, budget)
    for result in measure(progress, *arguments, **options):
        progress.keep(result)
        yield result


def run_trials(
    reader: Any, task: Any, lengths: list[int], trials: int, file: Path, kind: str = "passkey", **options: Any
) -> Iterator[list[Cell]]:
    """Cells of `eval passkey`, or of `eval needle` with one task, after every batch."""
    if kind == "needle":
        every = steps(needle.STUDY, needle.measure, file, reader, [task], lengths, trials, **options)
    else:
        study = replace(passkey.STUDY, kind=kind)
        every = steps(study, passkey.measure, file, reader, task, lengths, trials, **options)
    return (result.cells for result in every)


def run_perplexity(readers: Any, source: str, lengths: Any, file: Path, **options: Any) -> Iterator[Perplexity]:
    """Results of `eval perplexity`, after every row."""
    return steps(perplexity.STUDY, perplexity.measure, file, readers, source, lengths, **options)
