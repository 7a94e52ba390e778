"""Rates from errors: weighted least squares with standard errors, and which of two laws the data prefer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesattn.errors import UserError

LEAST_REPLICATES = 8
PERMUTATIONS = 20_000
# Of a logarithm of errors in float32.
LEAST_VARIANCE = 1e-13


@dataclass(frozen=True)
class Line:
    """log error = constant + slope · x, and the standard error of the slope.

    `misfit` is the sum of squared residuals in units of the errors' standard errors.
    """

    slope: float
    error: float
    misfit: float


def fit(x: Tensor, squared: Tensor) -> Line:
    """A line through the logarithm of the root mean square error.

    Args:
        x: `[G]`, the logarithm of n for a power law.
        squared: squared errors `[replicates, G]`. Those of one replicate may depend on each other, as over growing
            parts of one draw: the standard error of the slope takes that into account.
    """
    replicates, points = squared.shape
    check_replicates(replicates)
    if points < 3:
        raise UserError(f"a rate is fitted to {points} lengths; at least 3 are needed")
    x, squared = x.double(), squared.double()
    mean = squared.mean(0)
    if not bool(mean.isfinite().all()):
        raise UserError("errors are not finite: the logits are too large; give smaller scales or radii")
    if not bool((mean > 0).all()):
        raise UserError(f"{replicates} replicates are too few to tell the errors from zero; give more")
    # log of a root is half a log; small relative changes of a mean are small changes of its log.
    relative = (squared - mean) / mean / 2
    covariance = relative.T @ relative / (replicates - 1) / replicates
    y, weight = mean.log() / 2, 1 / covariance.diagonal().clamp(min=LEAST_VARIANCE)
    centre = (weight * x).sum() / weight.sum()
    pull = weight * (x - centre) / (weight * (x - centre) ** 2).sum()
    slope = (pull * y).sum()
    intercept = (weight * y).sum() / weight.sum() - slope * centre
    residual = y - intercept - slope * x
    misfit = float((weight * residual**2).sum())
    return Line(float(slope), math.sqrt(float(pull @ covariance @ pull)), misfit)


def check_replicates(replicates: int) -> None:
    if replicates < LEAST_REPLICATES:
        raise UserError(f"{replicates} replicates are too few for a fit; at least {LEAST_REPLICATES} are needed")


def grid(least: int, most: int, points: int) -> list[int]:
    """Whole numbers from `least` to `most`, each the same factor above the one before."""
    if not 2 <= least < most:
        raise UserError(f"lengths from {least:,} to {most:,} are asked for; the first must be smaller, and at least 2")
    if points < 3:
        raise UserError(f"{points} lengths are asked for; at least 3 are needed")
    factor = (most / least) ** (1 / (points - 1))
    found = sorted({round(least * factor**i) for i in range(points)})
    if len(found) < points:
        raise UserError(f"there are no {points} different lengths from {least:,} to {most:,}")
    return found


def straight(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and unexplained share of the variance of a plain line."""
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    intercept = b.mean() - slope * a.mean()
    left = ((b - intercept - slope * a) ** 2).sum() / ((b - b.mean()) ** 2).sum()
    return float(slope), float(left)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's correlation, and the share of random orders in which it is as far from zero."""
    ranks = torch.stack([_ranks(torch.tensor(x)), _ranks(torch.tensor(y))])
    ranks = torch.nn.functional.normalize(ranks - ranks.mean(-1, keepdim=True), dim=-1)
    rho = float(ranks[0] @ ranks[1])
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(PERMUTATIONS, len(x), generator=generator).argsort(-1)
    as_far = (ranks[1][order] @ ranks[0]).abs() >= abs(rho) - 1e-12
    return rho, float((as_far.sum() + 1) / (PERMUTATIONS + 1))


def _ranks(values: Tensor) -> Tensor:
    """From 0 on; equal values share the mean of their ranks."""
    below = (values[None] < values[:, None]).sum(-1)
    equal = (values[None] == values[:, None]).sum(-1)
    return below.double() + (equal - 1).double() / 2
