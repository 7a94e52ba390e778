from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bayesattn.interrupts import Interrupted
from bayesattn.studies.bench.inputs import Inputs, Shape
from bayesattn.studies.bench.load import measure as load
from bayesattn.studies.bench.load.run import STUDY, Load, Settings, run
from bayesattn.studies.bench.load.show import spread
from bayesattn.studies.results import read_results
from bayesattn.studies.runner import Saved
from bayesattn.training import trainer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SHAPE", Shape.parse("2x2x32x8"))
    other = load._other
    monkeypatch.setattr(load, "_other", lambda _, seconds, seed: other(load.NEIGHBOUR, seconds, seed))


def test_attention_and_trainings_are_measured_alone_and_beside_others(tmp_path: Path) -> None:
    progress: Saved[Load] = Saved(STUDY, tmp_path / "load.json")
    result = run(Settings(tries=2, seconds=0.1), progress)
    progress.finish(result)
    assert [(row.number, row.method) for row in result.attention] == [
        (number, method) for number in range(2) for method in (load.OURS, load.PLAIN)
    ]
    for row in result.attention:
        assert row.alone is not None
        assert row.beside is not None
        assert row.longest is not None
        assert 0 < row.beside <= row.longest
        assert row.slow_down == row.beside / row.alone
    assert [row.model for row in result.trainings] == [load.BAM] * 2 + [load.LLAMA] * 2
    assert all(speed > 0 for row in result.trainings for speed in (*row.steps_per_second, *row.shares))
    saved = read_results(tmp_path / "load.json", "bench-load")
    assert len(saved["attention"]) == len(saved["trainings"]) == 4


def test_tries_before_an_interruption_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, file = Settings(tries=2, seconds=0.1), tmp_path / "load.json"

    class Stopped(Saved[Load]):
        def keep(self, result: Load) -> None:
            super().keep(result)
            if len(result.trainings) == 1:
                raise Interrupted(2)

    with pytest.raises(Interrupted):
        run(settings, Stopped(STUDY, file))
    before = read_results(file, "bench-load")
    assert before["partial"]
    monkeypatch.delattr(load, "run_beside")
    result = run(settings, Saved(STUDY, file)).to_dict()
    assert result["attention"] == before["attention"]
    assert result["trainings"][0] == before["trainings"][0]
    assert [row["number"] for row in result["trainings"]] == [0, 1, 0, 1]


def test_a_budget_leaves_out_tries(tmp_path: Path) -> None:
    progress: Saved[Load] = Saved(STUDY, tmp_path / "load.json", budget=0.01)
    result = run(Settings(tries=1000, seconds=0.1), progress)
    assert {row.number for row in [*result.attention, *result.trainings]} == {0}


def test_attention_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "attend", lambda self: 0 * sum(x.sum() for x in self.trainable()) + self.q)
    ((ours, plain),) = load.run_beside([0], seconds=0.1)
    assert ours.slow_down is None
    assert ours.note.endswith("not timed")
    assert plain.slow_down is not None


def test_spread_is_over_all_trainings_of_a_model() -> None:
    rows = [
        load.Trainings(0, load.BAM, (10.0, 10.0), (0.5, 0.4)),
        load.Trainings(1, load.BAM, (20.0, 10.0), (0.4, 0.2)),
    ]
    assert spread(rows) == pytest.approx(8.0 / 2.0)
    assert spread([load.Trainings(0, load.LLAMA, (1.0, 1.0), (0.5, 0.5))]) == 1.0


@pytest.mark.parametrize("name", [load.BAM, load.LLAMA])
def test_training_steps_change_the_model_and_take_new_contexts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    stacked = trainer.stack_contexts
    monkeypatch.setattr(trainer, "stack_contexts", lambda items: taken.append(stacked(items)) or stacked(items))
    norms: list[float] = []
    clip = load.nn.utils.clip_grad_norm_
    monkeypatch.setattr(load.nn.utils, "clip_grad_norm_", lambda *given: norms.append(float(clip(*given))))
    step = load.WORKS[name](0)
    step()
    step()
    first, second = (batch["input_ids"] for batch in taken)
    assert first.shape == second.shape == (16, 128)
    assert not torch.equal(first, second)
    assert all(norm > 0 for norm in norms)
    assert len(norms) == 2
