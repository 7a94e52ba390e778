"""What the runner gives every long study: progress, partial results, budgets, and going on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bayesattn.interrupts import Interrupted
from bayesattn.studies import runner
from bayesattn.studies.convergence.hardmax import run as hardmax
from bayesattn.studies.convergence.moments import run as moments
from bayesattn.studies.convergence.prior import run as prior
from bayesattn.studies.convergence.uniform import run as uniform
from bayesattn.studies.perplexity import run as perplexity
from bayesattn.studies.results import read_results
from bayesattn.studies.runner import Saved, run_study

SHORT: dict[str, Any] = {"lengths": "64-256", "points": 3, "replicates": 10}
RUNS: dict[str, tuple[Any, Any]] = {
    "moments": (
        moments.STUDY,
        moments.STUDY.commands["convergence gaussian"](**SHORT, scales="1-4", number=2, dimension=4, share=1),
    ),
    "uniform": (uniform.STUDY, uniform.Settings(**SHORT, radii="1,2,3", dimension=3)),
    "hardmax": (hardmax.STUDY, hardmax.Settings(**SHORT, law="sphere")),
    "prior": (prior.STUDY, prior.Settings(**SHORT)),
}


class Stopped(Saved[Any]):
    """Stops a run when so many draws are done, and counts those that it makes."""

    def __init__(self, *arguments: Any, after: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.after, self.made = after, -1

    def is_due(self) -> bool:
        return True

    def step(self, what: str, done: int = 0, total: int | None = None) -> None:
        if what == "drawing tokens":
            self.made += 1
            if done == self.after:
                raise Interrupted(2)


@pytest.mark.parametrize("name", RUNS)
def test_draws_that_were_made_before_an_interruption_are_not_made_again(name: str, tmp_path: Path) -> None:
    study, settings = RUNS[name]
    whole = study.run(settings, Saved(study, tmp_path / "whole.json"))
    file = tmp_path / "results.json"
    with pytest.raises(Interrupted):
        study.run(settings, Stopped(study, file, after=9))
    content = read_results(file, study.kind)  # of the eight draws before, which are enough for a fit
    assert (content["replicates"], content["partial"]) == (8, True)
    again = Stopped(study, file, after=-1)
    result = study.run(settings, again)
    again.finish(result)
    assert again.made == 2
    assert result == whole
    assert read_results(file, study.kind)["replicates"] == 10
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert study.run(replace(settings, seed=1), Saved(study, file)) != whole


def test_draws_of_other_settings_or_a_damaged_file_are_made_anew(tmp_path: Path) -> None:
    study, settings = RUNS["hardmax"]
    file = tmp_path / "results.json"
    with pytest.raises(Interrupted):
        study.run(settings, Stopped(study, file, after=9))
    other = Stopped(study, file, after=-1)
    study.run(replace(settings, law="gaussian"), other)
    assert other.made == 10
    file.with_name("results.json.draws").write_bytes(b"PK\3\4 half a file")
    damaged = Stopped(study, file, after=-1)
    study.run(settings, damaged)
    assert damaged.made == 10


class Hours:
    """A clock by which every look takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_a_budget_ends_draws_and_the_same_command_goes_on(tmp_path: Path) -> None:
    study, settings = RUNS["uniform"]
    progress: Saved[Any] = Saved(study, tmp_path / "results.json", budget=1000.0)
    left = iter([-1.0] * 100)
    progress.left = lambda: next(left)  # type: ignore[method-assign]
    result = study.run(settings, progress)
    progress.finish(result)
    assert result.replicates == 8  # as many as a fit needs
    assert progress.raw.exists()
    more: Saved[Any] = Saved(study, tmp_path / "results.json")
    assert study.run(settings, more).replicates == 10


def measure_perplexity(file: Path, left: Callable[[], float]) -> perplexity.Perplexity:
    settings = perplexity.Settings(["bam-tiny"], lengths="0,128,256", windows=8)
    progress: Saved[Any] = Saved(perplexity.STUDY, file)
    progress.left = left  # type: ignore[method-assign]
    result = perplexity.run(settings, progress)
    progress.finish(result)
    return result


def test_perplexity_within_a_budget_reads_fewer_windows_and_goes_on(tmp_path: Path) -> None:
    whole = measure_perplexity(tmp_path / "whole.json", lambda: float("inf"))
    file = tmp_path / "results.json"
    seconds = iter([100.0] * 2 + [90.0] * 2 + [-1.0] * 100)
    (model,) = measure_perplexity(file, lambda: next(seconds)).models
    (first,) = model.rows  # for the other contexts there was no time
    assert 2 <= first.windows < 8
    assert first.losses == whole.models[0].rows[0].losses[: first.windows]
    (model,) = measure_perplexity(file, lambda: float("inf")).models
    assert [replace(row, seconds=0) for row in model.rows] == [replace(row, seconds=0) for row in whole.models[0].rows]


def test_without_a_terminal_progress_is_a_line_now_and_then(tmp_path: Path) -> None:
    output = StringIO()
    study, _ = RUNS["prior"]
    shown: Any = runner.Shown(study, tmp_path / "r.json", console=Console(file=output, width=80))
    shown._clock, shown._begin = Hours(1.0), 0.0
    for done in range(40):
        shown.step("drawing tokens", done, 500)
    assert output.getvalue().splitlines() == [f"drawing tokens: {done} of 500" for done in (2, 8, 14, 20, 26, 32, 38)]


def test_in_a_terminal_there_is_a_bar_and_the_table_so_far(tmp_path: Path) -> None:
    output = StringIO()
    console = Console(file=output, width=100, force_terminal=True)
    settings = perplexity.Settings(["bam-tiny"], lengths="0,128", windows=4, json=tmp_path / "r.json", out=tmp_path)
    run_study(perplexity.STUDY, settings, console, "bayesattn eval perplexity")
    told = output.getvalue()
    assert "loading" in told
    assert told.count("Perplexity of the held-out part") >= 2
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "bayesattn eval perplexity"
    assert not list(tmp_path.glob("*.elsewhere"))
