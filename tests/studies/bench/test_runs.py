from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bayesattn.studies.bench import runs
from bayesattn.studies.bench.short.run import STUDY, Timing, Timings
from bayesattn.studies.runner import Saved
from bayesattn.studies.study import Progress


def row(shape: str) -> Timing:
    return Timing(shape, runs.FORWARD, 0.5, 0.25, 2.0, 0.1, 1e-7)


def measure(missing: Sequence[str]) -> Iterator[list[Timing]]:
    assert missing
    for shape in missing:
        yield [row(shape)]


def by_part(progress: Progress[Timings], parts: list[str], done: list[Timing]) -> list[list[str]]:
    measured = runs.by_part(progress, "measuring", parts, done, lambda row: row.shape, measure)
    return [[row.shape for row in rows] for rows in measured]


def test_parts_that_are_done_are_not_measured_again() -> None:
    assert by_part(Progress(), ["a", "b", "c"], [row("b")]) == [["b", "a"], ["b", "a", "c"]]
    assert by_part(Progress(), ["a"], [row("a")]) == []


def test_a_budget_leaves_out_parts_after_the_first() -> None:
    assert by_part(Progress(budget=0.0), ["a", "b"], []) == [["a"]]


@pytest.mark.parametrize(("seed", "partial", "goes_on"), [(0, True, True), (1, True, False), (0, False, False)])
def test_only_a_partial_result_of_the_same_settings_goes_on(
    seed: int, partial: bool, goes_on: bool, tmp_path: Path
) -> None:
    result = Timings(settings={"seed": 0}, rows=[row("a")])
    progress: Saved[Timings] = Saved(STUDY, tmp_path / "short.json")
    (progress.keep if partial else progress.finish)(result)
    before = runs.stopped(progress, {"seed": seed})
    assert (before is not None) == goes_on
    assert before is None or before.rows == result.rows
