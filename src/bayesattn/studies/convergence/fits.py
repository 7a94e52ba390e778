"""Rates fitted to errors by weighted least squares, with standard errors; grids of lengths; rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesattn.errors import UserError

LEAST_REPLICATES = 8
PERMUTATIONS = 20_000
# Variance of the logarithm of an error from rounding in float32.
LEAST_VARIANCE = 1e-13


@dataclass(frozen=True)
class Line:
    """The fitted line log error = constant + slope · x.

    `error` is the standard error of the slope. `misfit` is the sum of squared residuals, each in units of its standard
    error.
    """

    slope: float
    error: float
    misfit: float


def fit(x: Tensor, squared: Tensor) -> Line:
    """Fit a line to the logarithm of the root mean square error.

    Args:
        x: `[G]`, the logarithm of n for a power law.
        squared: squared errors `[replicates, G]`. The errors of one replicate may be correlated, for example over
            prefixes of one draw; the standard error of the slope accounts for this.
    """
    replicates, points = squared.shape
    check_replicates(replicates)
    if points < 3:
        raise UserError(f"{points} lengths are too few to fit a rate; at least 3 are needed")
    x, squared = x.double(), squared.double()
    mean = squared.mean(0)
    if not bool(mean.isfinite().all()):
        raise UserError("the errors are not finite because the logits are too large; give smaller scales or radii")
    if not bool((mean > 0).all()):
        raise UserError(f"{replicates} replicates are too few to distinguish the errors from zero; give more")
    # The log of a root is half the log; to first order, relative changes of a mean are changes of its log.
    relative = (squared - mean) / mean / 2
    covariance = relative.T @ relative / (replicates - 1) / replicates
    y, weight = mean.log() / 2, 1 / covariance.diagonal().clamp(min=LEAST_VARIANCE)
    centre = (weight * x).sum() / weight.sum()
    influence = weight * (x - centre) / (weight * (x - centre) ** 2).sum()
    slope = (influence * y).sum()
    intercept = (weight * y).sum() / weight.sum() - slope * centre
    residual = y - intercept - slope * x
    misfit = float((weight * residual**2).sum())
    return Line(float(slope), math.sqrt(float(influence @ covariance @ influence)), misfit)


def check_replicates(replicates: int) -> None:
    if replicates < LEAST_REPLICATES:
        raise UserError(f"{replicates} replicates are too few for a fit; at least {LEAST_REPLICATES} are needed")


def grid(least: int, most: int, points: int) -> list[int]:
    """Whole numbers from `least` to `most` in a geometric series."""
    if not 2 <= least < most:
        raise UserError(f"the lengths are {least:,} to {most:,}; the first must be smaller, and at least 2")
    if points < 3:
        raise UserError(f"{points} lengths are too few to fit a rate; at least 3 are needed")
    factor = (most / least) ** (1 / (points - 1))
    lengths = sorted({round(least * factor**i) for i in range(points)})
    if len(lengths) < points:
        raise UserError(f"there are no {points} different lengths from {least:,} to {most:,}; give fewer points")
    return lengths


def least_squares(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of an unweighted line through the points, and the share of the variance that it leaves unexplained."""
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    intercept = b.mean() - slope * a.mean()
    unexplained = ((b - intercept - slope * a) ** 2).sum() / ((b - b.mean()) ** 2).sum()
    return float(slope), float(unexplained)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's correlation, and its p-value: the share of random orders with one at least as far from zero."""
    ranks = torch.stack([_ranks(torch.tensor(x)), _ranks(torch.tensor(y))])
    ranks = torch.nn.functional.normalize(ranks - ranks.mean(-1, keepdim=True), dim=-1)
    rho = float(ranks[0] @ ranks[1])
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(PERMUTATIONS, len(x), generator=generator).argsort(-1)
    at_least_as_far = (ranks[1][order] @ ranks[0]).abs() >= abs(rho) - 1e-12
    return rho, float((at_least_as_far.sum() + 1) / (PERMUTATIONS + 1))


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of their ranks."""
    below = (values[None] < values[:, None]).sum(-1)
    equal = (values[None] == values[:, None]).sum(-1)
    return below.double() + (equal - 1).double() / 2
