from __future__ import annotations

import dataclasses

import pytest

from bayesattn.studies.bench.attention import measure as attention
from bayesattn.studies.bench.measure import bytes_needed


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


def test_what_needs_too_much_is_decided_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []

    def peak(tokens: int) -> int:
        probed.append(tokens)
        return 10 * tokens**2

    assert bytes_needed(999, 1000, 4096, peak) == 999
    assert not probed
    assert bytes_needed(2000, 1000, 4096, peak) == 10 * 4096**2
    assert bytes_needed(2000, 1000, 100, peak) == 10 * 100**2
    assert probed == [1024, 100]
    assert bytes_needed(2000, 1000, 4096, None) == 2000
    dense = next(m for m in attention.METHODS if m.name == "dense autograd, scaled")
    monkeypatch.setattr(attention, "peak_memory", lambda method, tokens, seed=0: 16 * tokens**2)
    monkeypatch.setattr(attention, "device_memory", lambda: 100 * 256**2)  # the bound is 288 times that
    (row,) = next(attention.measure([256], methods=[dense]))
    assert row.seconds is not None
    monkeypatch.setattr(attention, "device_memory", lambda: 16 * 256**2)
    (row,) = next(attention.measure([256], methods=[dense]))
    assert row.note == f"needs {16 * 256**2 / 1e9:.0f} GB"


def test_flex_attention_has_no_backward_on_a_cpu_and_the_table_says_so() -> None:
    (row,) = next(
        attention.measure(
            [64],
            memory=False,
            methods=[m for m in attention.METHODS if m.phase == attention.TRAINING and "Flex" in m.name],
        )
    )
    assert (row.seconds, row.note) == (None, "no backward on CPU")
