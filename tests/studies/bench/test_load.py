from __future__ import annotations

import json

import pytest
import torch

from bayesattn.studies.bench.inputs import Inputs, Shape
from bayesattn.studies.bench.load import measure as load
from bayesattn.training import trainer

SETTINGS = load.Settings(tries=2, seconds=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SHAPE", Shape.parse("2x2x32x8"))
    other = load._other
    monkeypatch.setattr(load, "_other", lambda _, seconds, seed: other(load.NEIGHBOUR, seconds, seed))


def test_attention_and_trainings_are_measured_alone_and_beside_others() -> None:
    parts = list(load.run(SETTINGS))
    assert len(parts) == load.parts(SETTINGS) == 6
    rows = [row for part in parts for row in part]
    beside = [row for row in rows if isinstance(row, load.Beside)]
    trainings = [row for row in rows if isinstance(row, load.Trainings)]
    assert [(row.number, row.method) for row in beside] == [
        (number, method) for number in range(2) for method in (load.OURS, load.PLAIN)
    ]
    for row in beside:
        assert row.alone is not None
        assert row.beside is not None
        assert row.longest is not None
        assert 0 < row.beside <= row.longest
        assert row.slow_down == row.beside / row.alone
    assert [row.model for row in trainings] == [load.BAM] * 2 + [load.LLAMA] * 2
    assert all(speed > 0 for row in trainings for speed in (*row.steps_per_second, *row.shares))
    saved = json.loads(load.to_json(beside, trainings, SETTINGS))
    assert len(saved["attention"]) == len(saved["trainings"]) == 4


def test_attention_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "attend", lambda self: 0 * sum(x.sum() for x in self.trainable()) + self.q)
    first = next(load.run(load.Settings(tries=1, seconds=0.1)))
    ours, plain = first
    assert isinstance(ours, load.Beside)
    assert isinstance(plain, load.Beside)
    assert ours.slow_down is None
    assert ours.note.endswith("not timed")
    assert plain.slow_down is not None
    assert load.slow_down([ours], load.OURS) is None


def test_spread_is_over_all_trainings_of_a_model() -> None:
    rows = [
        load.Trainings(0, load.BAM, (10.0, 10.0), (0.5, 0.4)),
        load.Trainings(1, load.BAM, (20.0, 10.0), (0.4, 0.2)),
        load.Trainings(0, load.LLAMA, (1.0, 1.0), (0.5, 0.5)),
    ]
    assert load.spread(rows, load.BAM) == pytest.approx(8.0 / 2.0)
    assert load.spread(rows, load.LLAMA) == 1.0


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
