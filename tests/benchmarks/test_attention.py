from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from bayesattn.benchmarks import attention, measure


def test_a_method_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next(m for m in attention.METHODS if m.name == "bayesattn")
    wrong = dataclasses.replace(ours, prepare=lambda x: lambda: x.v)
    monkeypatch.setattr(attention, "METHODS", [attention.METHODS[0], wrong])
    plain, row = next(attention.run([64], memory=False))
    assert plain.ratio == 1
    assert row.seconds is None
    assert row.ratio is None
    assert "not timed" in row.note


def test_a_method_that_would_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "physical_memory", lambda: 1_000_000)
    rows = {row.method: row for row in next(attention.run([256], memory=False, flex=False))}
    assert rows["SDPA with bias matrix"].note.startswith("needs ")
    assert rows["bayesattn"].seconds is not None


def test_peak_memory_counts_what_is_allocated_and_freed() -> None:
    assert measure.peak_bytes(lambda: torch.ones(50_000_000).sum()) == pytest.approx(200e6, rel=0.1)
    assert measure.peak_bytes(lambda: None) < 20e6


def test_functions_are_timed_in_turn() -> None:
    calls: list[str] = []
    seconds = measure.seconds_in_turn(
        {"slow": lambda: (calls.append("slow"), time.sleep(0.02)), "fast": lambda: calls.append("fast")}
    )
    assert calls[:4] == ["slow", "fast", "slow", "fast"]
    assert seconds["slow"] >= 0.02
