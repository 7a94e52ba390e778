from __future__ import annotations

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.studies.convergence.fits import fit, grid, least_squares, rank_correlation


def simulated(count: int, slope: float, points: int, shared: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors around a power law; `shared` is the correlation within a replicate."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.logspace(2, 4, points, dtype=torch.float64)
    noise = torch.randn(count, points, generator=generator, dtype=torch.float64)
    common_noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    spread = (0.3 * (shared**0.5 * common_noise + (1 - shared) ** 0.5 * noise)).exp()
    return n.log(), n ** (2 * slope) * spread


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_slopes_deviate_by_their_standard_errors(shared: float) -> None:
    deviations = []
    for seed in range(200):
        x, squared = simulated(40, -0.4, 8, shared, seed)
        line = fit(x, squared)
        deviations.append((line.slope + 0.4) / line.error)
    assert 0.8 < torch.tensor(deviations).std() < 1.25
    assert abs(torch.tensor(deviations).mean()) < 0.3


def test_exact_powers_are_fitted_exactly() -> None:
    n = torch.tensor([10.0, 100.0, 1000.0])
    squared = (4 / n)[None] * torch.tensor([1.0, 1.01] * 4)[:, None]
    line = fit(n.log(), squared)
    assert line.slope == pytest.approx(-0.5)
    assert line.misfit == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("squared", "sentence"),
    [
        (torch.ones(7, 5), "7 replicates are too few for a fit; at least 8 are needed"),
        (torch.ones(8, 2), "2 lengths are too few to fit a rate; at least 3 are needed"),
        (torch.full((8, 5), torch.inf), "the errors are not finite because the logits are too large"),
        (-torch.ones(8, 5), "8 replicates are too few to distinguish the errors from zero; give more"),
    ],
)
def test_errors_that_cannot_be_fitted_get_one_sentence(squared: torch.Tensor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fit(torch.arange(1.0, squared.shape[1] + 1), squared)


def test_grids_are_geometric() -> None:
    assert grid(10, 1000, 3) == [10, 100, 1000]
    assert len(grid(1000, 30_000, 12)) == 12


@pytest.mark.parametrize(
    ("least", "most", "points", "sentence"),
    [
        (10, 10, 3, "the lengths are 10 to 10; the first must be smaller, and at least 2"),
        (1, 10, 3, "the lengths are 1 to 10; the first must be smaller, and at least 2"),
        (10, 100, 2, "2 lengths are too few to fit a rate; at least 3 are needed"),
        (10, 12, 8, "there are no 8 different lengths from 10 to 12; give fewer points"),
    ],
)
def test_impossible_grids_get_one_sentence(least: int, most: int, points: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        grid(least, most, points)


def test_least_squares_explain_a_line_and_part_of_a_curve() -> None:
    assert least_squares([1, 2, 3], [5, 7, 9]) == (pytest.approx(2), pytest.approx(0, abs=1e-12))
    slope, unexplained = least_squares([0, 1, 2], [0, 1, 0])
    assert (slope, unexplained) == (pytest.approx(0), pytest.approx(1))


def test_rank_correlations_are_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 100])[0] == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 4], [1, 2, 2, 3])[0] == pytest.approx(1)  # ties share a rank
    rho, chance = rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert rho == pytest.approx(0.8)
    assert chance == pytest.approx(16 / 120, abs=0.01)  # of the 120 orders, 16 are as far from zero
