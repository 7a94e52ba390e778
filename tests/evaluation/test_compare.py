from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bayesattn.evaluation.compare import compare, trials_needed
from bayesattn.evaluation.intervals import newcombe
from bayesattn.evaluation.trials import Cell
from bayesattn.files import write_results


def results(file: Path, model: str, shares: dict[int, tuple[int, int]], **settings: object) -> Path:
    cells = [
        Cell(n, tuple((0.5, t < right) for t in range(of)), planned=of).to_dict() for n, (right, of) in shares.items()
    ]
    write_results(
        file, "passkey", {"model": model, "settings": {"wording": "standard", "seed": 0} | settings, "cells": cells}
    )
    return file


def test_verdicts_differences_and_trials(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", "a", {128: (50, 100), 512: (50, 100), 2048: (50, 100), 8192: (1, 2)})
    second = results(tmp_path / "b.json", "b", {128: (90, 100), 512: (10, 100), 2048: (55, 100)}, seed=1)
    better, worse, unclear = compare([first, second])
    assert (better.verdict, worse.verdict, unclear.verdict) == ("better", "worse", "cannot tell")
    assert better.difference == pytest.approx(0.4)
    assert better.low < 0.4 < better.high
    assert unclear.needed is not None
    assert 1500 < unclear.needed < 1600
    assert trials_needed(0.5, 0.5) is None


def test_intervals_of_differences_are_the_published_ones_and_cover() -> None:
    # Newcombe (1998), table II, method 10
    assert newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert newcombe(9, 10, 3, 10) == pytest.approx((0.1705, 0.8090), abs=1e-4)
    generator = torch.Generator().manual_seed(0)
    first = (torch.rand(2000, 80, generator=generator) < 0.9).sum(1).tolist()
    second = (torch.rand(2000, 60, generator=generator) < 0.7).sum(1).tolist()
    covered = sum(
        low <= 0.2 <= high for low, high in (newcombe(a, 80, b, 60) for a, b in zip(first, second, strict=True))
    )
    assert 0.93 <= covered / 2000 <= 0.97


def test_what_does_not_compare_gets_one_sentence(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", "a", {128: (5, 10)})
    with pytest.raises(ValueError, match="1 file is given; a comparison needs at least two"):
        compare([first])
    with pytest.raises(ValueError, match=r"was measured otherwise than .* \(wording\); they do not compare"):
        compare([first, results(tmp_path / "b.json", "b", {128: (5, 10)}, wording="train")])
    with pytest.raises(ValueError, match="have no length in common"):
        compare([first, results(tmp_path / "c.json", "c", {256: (5, 10)})])
    (tmp_path / "d.json").write_text(json.dumps({"version": 1, "kind": "perplexity"}))
    with pytest.raises(ValueError, match="has results of perplexity; passkey is needed"):
        compare([first, tmp_path / "d.json"])
