from __future__ import annotations

import pytest
import torch

from bayesattn.evaluation.intervals import wilson


def test_known_values() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="11 right of 10 trials"):
        wilson(11, 10)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_95_percent_intervals_cover_about_95_percent(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(2000, 100, generator=generator) < share).sum(1).tolist()
    covered = sum(low <= share <= high for low, high in (wilson(r, 100) for r in right))
    assert 0.93 <= covered / 2000 <= 0.97
