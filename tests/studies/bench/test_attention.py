from __future__ import annotations

import dataclasses

import pytest

from bayesattn.studies.bench.attention import measure as attention


def test_a_method_that_is_wrong_is_not_timed() -> None:
    ours = next(m for m in attention.METHODS if m.name == "bayesattn")
    wrong = dataclasses.replace(ours, prepare=lambda x: lambda: x.v)
    plain, row = next(attention.measure([64], memory=False, methods=[attention.METHODS[0], wrong]))
    assert plain.ratio == 1
    assert row.seconds is None
    assert row.ratio is None
    assert "not timed" in row.note


def test_a_method_that_would_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "device_memory", lambda: 1_000_000)
    rows = {row.method: row for row in next(attention.measure([256], memory=False, flex=False))}
    assert rows["SDPA with bias matrix"].note.startswith("needs ")
    assert rows["bayesattn"].seconds is not None


def test_dense_training_needs_matrices_of_memory_and_ours_does_not() -> None:
    training = {m.name: m for m in attention.METHODS if m.phase == attention.TRAINING}
    matrix = attention.HEADS * 1024**2 * 4
    assert attention.peak_memory(training["dense autograd, scaled"], 1024) > 3 * matrix
    assert 0 < attention.peak_memory(training["bayesattn, scaled"], 1024) < 3 * matrix
