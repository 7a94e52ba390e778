from __future__ import annotations

import pytest
import torch

from bayesattn.evaluation.intervals import wilson


@pytest.mark.parametrize(
    ("right", "trials", "interval"),
    [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962)), (0, 0, (0.0, 1.0))],
)
def test_wilson_intervals_are_those_of_tables(right: int, trials: int, interval: tuple[float, float]) -> None:
    assert wilson(right, trials) == pytest.approx(interval, abs=1e-3)


@pytest.mark.parametrize("right", [-1, 11])
def test_more_right_than_trials_is_refused(right: int) -> None:
    with pytest.raises(ValueError, match=f"{right} of 10 trials are right; a number from 0 to 10 is needed"):
        wilson(right, 10)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_95_percent_intervals_cover_about_95_percent(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(2000, 100, generator=generator) < share).sum(1).tolist()
    covered = sum(low <= share <= high for low, high in (wilson(r, 100) for r in right))
    assert 0.93 <= covered / 2000 <= 0.97
