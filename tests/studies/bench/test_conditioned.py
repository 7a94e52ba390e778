from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import bayesattn as ba
from bayesattn.studies.bench.conditioned import cases, measure
from bayesattn.studies.bench.conditioned.cases import PRIORS, PROFILES, STATIC, Case
from bayesattn.studies.bench.conditioned.run import STUDY, Conditioned, Settings, run
from bayesattn.studies.bench.runs import FORWARD, TRAINING
from bayesattn.studies.runner import Saved


def test_every_prior_is_compared_in_both_phases() -> None:
    forward, training = measure.measure([(FORWARD, 64), (TRAINING, 70)], memory=False)
    assert [row.prior for row in forward] == [row.prior for row in training] == [*PRIORS]
    for row in [*forward, *training]:
        assert row.seconds is not None
        assert row.baseline_seconds is not None
        assert row.ratio == pytest.approx(row.seconds / row.baseline_seconds)
        assert row.error < 1e-3
        assert row.peak_bytes is None
    assert len({row.baseline_seconds for row in forward}) == 1  # plain SDPA; dense autograd is another for each prior


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PRIORS", {STATIC: PRIORS[STATIC]})
    settings = Settings(lengths="64,128", training="64", memory=False, inkling=False)
    progress: Saved[Conditioned] = Saved(STUDY, tmp_path / "conditioned.json")
    known = measure.sizes(0)
    kept = [row for rows in measure.measure([(FORWARD, 64)], memory=False, priors=[STATIC]) for row in rows]
    progress.keep(Conditioned(settings=known, rows=kept, inkling=[]))
    result = run(settings, progress)
    assert result.rows[:1] == kept
    assert {(row.phase, row.tokens) for row in result.rows} == {(FORWARD, 64), (FORWARD, 128), (TRAINING, 64)}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_whose_rows_are_wrong_is_seen(name: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(name, 70)
    assert not case.error(gradients).is_too_large
    right = ba.bayesian_attention

    def wrong(*arguments: Tensor, implementation: str, **settings: object) -> Tensor:
        out = right(*arguments, implementation=implementation, **settings)
        return out if implementation == "reference" else out * 1.01

    monkeypatch.setattr(cases.ba, "bayesian_attention", wrong)
    assert case.error(gradients).is_too_large


def test_a_gradient_that_is_nan_is_an_error() -> None:
    case = Case.make("ConditionedGaussian", 64)
    case.v[..., -1, :] = math.nan
    assert case.error(gradients=True).is_too_large


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "error", lambda self, gradients: cases.Error(0.5, 1e-4))
    for rows in measure.measure([(FORWARD, 64), (TRAINING, 64)], priors=["Fire"]):
        (row,) = rows
        assert row.seconds is row.ratio is row.peak_bytes is None
        assert row.note == "wrong by 5.0e-01, not timed"


def test_dense_autograd_that_would_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "device_memory", lambda: 1_000_000)
    ((row,),) = measure.measure([(TRAINING, 256)], memory=False, priors=["Fire"])
    assert row.seconds is not None
    assert row.baseline_seconds is row.ratio is None
    assert row.note.startswith("needs ")


def test_what_would_take_too_long_is_left_out_and_said() -> None:
    first, second, third = measure.measure(
        [(FORWARD, 64), (FORWARD, 128), (FORWARD, 256)], memory=False, longest=0.0, priors=["Fire"]
    )
    assert first[0].seconds is not None
    assert second[0].note.startswith("would take about")
    assert third[0].note == "too long"
    earlier = [replace(first[0], seconds=3.0)]
    ((row,),) = measure.measure([(FORWARD, 128)], earlier, memory=False, longest=10.0, priors=["Fire"])
    assert row.note == "would take about 12 s"


@pytest.mark.parametrize("name", PRIORS)
def test_all_that_a_prior_learns_gets_a_gradient(name: str) -> None:
    gradients = Case.make(name, 64).training()()
    assert all(gradient is not None for gradient in gradients)


def test_memory_of_training_is_that_of_tiles_and_not_of_matrices() -> None:
    matrix = measure.HEADS * 2048**2 * 4
    assert 0 < measure.peak_memory(PROFILES, TRAINING, 2048) < matrix


def test_inklings_attention_is_measured_with_ours_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    inkling = pytest.importorskip("bayesattn.studies.bench.conditioned.inkling")
    full, sliding = inkling.measure(64, memory=False)
    assert (full.layer, sliding.layer) == ("full", "sliding")
    for row in (full, sliding):
        assert row.seconds > 0
        assert row.peer_seconds > 0
        assert row.error < 1e-5
    assert inkling.peak_memory("full", "transformers", 512) > measure.HEADS * 512**2 * 4
    monkeypatch.setattr(inkling, "device_memory", lambda: 1_000_000)
    assert all(row.note.startswith("needs ") and row.seconds is None for row in inkling.measure(512))


def test_ours_in_inklings_place_is_not_timed_if_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    inkling = pytest.importorskip("bayesattn.studies.bench.conditioned.inkling")
    monkeypatch.setattr(inkling, "with_ours", lambda layer, hidden: hidden)
    for row in inkling.measure(64):
        assert row.seconds is row.peer_seconds is row.peak_bytes is None
        assert row.note.endswith("not timed")
