from __future__ import annotations

import pytest
import torch

from bayesattn.convergence.fits import fit, grid, rank_correlation, straight
from bayesattn.errors import UserError


def simulated(count: int, slope: float, points: int, shared: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors around a power law, those of one replicate going up and down together."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.logspace(2, 4, points, dtype=torch.float64)
    noise = torch.randn(count, points, generator=generator, dtype=torch.float64)
    together = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    spread = (0.3 * (shared**0.5 * together + (1 - shared) ** 0.5 * noise)).exp()
    return n.log(), n ** (2 * slope) * spread


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_slopes_are_found_within_their_standard_errors(shared: float) -> None:
    off = []
    for seed in range(200):
        x, squared = simulated(40, -0.4, 8, shared, seed)
        line = fit(x, squared)
        off.append((line.slope + 0.4) / line.error)
    assert 0.8 < torch.tensor(off).std() < 1.25
    assert abs(torch.tensor(off).mean()) < 0.3


def test_exact_powers_are_fitted_exactly() -> None:
    n = torch.tensor([10.0, 100.0, 1000.0])
    squared = (4 / n)[None] * torch.tensor([1.0, 1.01] * 4)[:, None]
    line = fit(n.log(), squared)
    assert line.slope == pytest.approx(-0.5)
    assert line.misfit == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("squared", "message"),
    [
        (torch.ones(7, 5), "7 replicates are too few for a fit; at least 8 are needed"),
        (torch.ones(8, 2), "a rate is fitted to 2 lengths; at least 3 are needed"),
        (torch.full((8, 5), torch.inf), "errors are not finite: the logits are too large"),
        (-torch.ones(8, 5), "8 replicates are too few to tell the errors from zero; give more"),
    ],
)
def test_too_little_gets_one_sentence(squared: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(torch.arange(1.0, squared.shape[1] + 1), squared)


def test_grids_are_geometric() -> None:
    assert grid(10, 1000, 3) == [10, 100, 1000]
    assert len(grid(1000, 30_000, 12)) == 12
    for arguments in [(10, 10, 3), (1, 10, 3), (10, 100, 2), (10, 12, 8)]:
        with pytest.raises(UserError):
            grid(*arguments)


def test_a_line_explains_itself() -> None:
    slope, left = straight([1, 2, 3], [5, 7, 9])
    assert slope == pytest.approx(2)
    assert left == pytest.approx(0, abs=1e-12)


def test_rank_correlations_are_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 100])[0] == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 4], [1, 2, 2, 3])[0] == pytest.approx(1)  # ties share a rank
    rho, chance = rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert rho == pytest.approx(0.8)
    assert chance == pytest.approx(16 / 120, abs=0.01)  # of the 120 orders, 16 are as far from zero
