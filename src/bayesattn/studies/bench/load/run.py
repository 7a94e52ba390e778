"""Attention and training while another process computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer

from bayesattn.schemas import Amount, Anything, Row, Whole, record, text
from bayesattn.studies.bench import runs
from bayesattn.studies.options import finite
from bayesattn.studies.study import Progress, Study


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time attention and training beside another process.

    Two trainings run side by side, too. The other processes are started by the command and end with it. It takes about
    three minutes on two cores and saves the JSON file after every try.

    Example: bayesattn bench load --tries 3 --seconds 1 --json load.json
    """

    file: ClassVar[str] = "load"
    title: ClassVar[str] = "bench-load"

    tries: Annotated[int, typer.Option(min=1, max=1000, help="How often everything is measured.")] = 5
    seconds: Annotated[float, typer.Option(min=0.1, max=600, callback=finite, help="Seconds of one measurement.")] = 2.0


@dataclass(frozen=True)
class Beside(Row):
    """Attention, forward and backward, in one try.

    Args:
        alone, beside: mean seconds of a call alone, and beside the other process. The mean, because a training waits
            for its slow calls too.
        longest: seconds of the slowest call beside the other process.
        neighbour: speed of the other process beside this one, relative to its speed alone.
        error: largest relative error against the float64 reference.
    """

    derived: ClassVar[tuple[str, ...]] = ("slow_down",)

    number: Whole
    method: str
    alone: runs.Positive | None
    beside: Amount | None
    longest: Amount | None
    neighbour: Amount | None
    error: Amount | None
    note: str = ""

    @property
    def slow_down(self) -> Amount | None:
        return None if self.alone is None or self.beside is None else self.beside / self.alone


@dataclass(frozen=True)
class Trainings(Row):
    """Two equal trainings in one try: steps a second of each alone, and the share of it side by side."""

    number: Whole
    model: str
    steps_per_second: tuple[runs.Positive, runs.Positive]
    shares: tuple[runs.Positive, runs.Positive]


@dataclass(frozen=True, kw_only=True)
class Load(runs.Measured):
    """Every try of attention, and of the trainings of each model."""

    settings: Annotated[dict[str, Anything], record({"shape": text})]
    attention: list[Beside]
    trainings: list[Trainings]


def run(settings: Settings, progress: Progress[Load]) -> Load:
    from bayesattn.studies.bench.load import measure

    tries, seconds, seed = range(settings.tries), settings.seconds, settings.seed
    sizes = measure.sizes(settings.tries, seconds, seed)
    result = runs.stopped(progress, sizes) or Load(settings=sizes, attention=[], trainings=[])
    for attention in runs.by_part(
        progress,
        "attention beside another process",
        tries,
        result.attention,
        lambda row: row.number,
        lambda missing: measure.run_beside(missing, seconds, seed),
    ):
        result = replace(result, attention=attention)
        progress.keep(result)
    for model in (measure.BAM, measure.LLAMA):
        others = [row for row in result.trainings if row.model != model]
        for trainings in runs.by_part(
            progress,
            f"two trainings of {model}",
            tries,
            [row for row in result.trainings if row.model == model],
            lambda row: row.number,
            lambda missing, model=model: measure.run_trainings(model, missing, seconds, seed),  # type: ignore[misc]
        ):
            result = replace(result, trainings=others + trainings)
            progress.keep(result)
    return result


STUDY = Study(kind="bench-load", commands={"bench load": Settings}, run=run, result=Load, place=104)
