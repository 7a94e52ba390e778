"""How fast the mean and the covariance of attention's outputs converge, by the horizon of the attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from bayesattn.convergence.fits import check_replicates, fit
from bayesattn.convergence.laws import Head, Law
from bayesattn.convergence.prefixes import prefix_attention
from bayesattn.errors import UserError


@dataclass(frozen=True)
class Row:
    """One sharpness of attention: its horizon, the rates of both moments, and the errors they were fitted to."""

    scale: float
    horizon: float
    slope_mean: float
    slope_mean_se: float
    slope_cov: float
    slope_cov_se: float
    errors_mean: list[float]
    errors_cov: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def scales(least: float = 0.05, most: float = 50.0, number: int = 12) -> list[float]:
    return [float(s) for s in torch.logspace(math.log10(least), math.log10(most), number)]


def squared_errors(out: Tensor, tokens: int, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of the mean and the covariance of outputs `[…, m, d]`, against those given.

    The m queries are a part, drawn at random, of all the tokens. What that adds to the squared errors is estimated from
    the spread of the outputs and taken off, so that the result is, on average, that of all tokens asking.
    """
    m = out.shape[-2]
    left_out = 1 / m - 1 / tokens
    centre = out.mean(-2)
    spread = out - centre[..., None, :]
    found = spread.mT @ spread / (m - 1)
    size = (spread**2).sum(-1)
    of_mean = ((centre - mean) ** 2).sum(-1) - left_out * size.sum(-1) / (m - 1)
    fourth = ((size**2).mean(-1) - (found**2).sum((-2, -1))) * m / (m - 1)
    of_covariance = ((found - covariance) ** 2).sum((-2, -1)) - left_out * fourth
    return of_mean, of_covariance


def replicate(
    law: Law,
    head: Head,
    scales: Sequence[float],
    grid: Sequence[int],
    limits: Sequence[tuple[Tensor, Tensor]],
    generator: Generator,
    share: int,
) -> Tensor:
    """Squared errors `[scales, lengths, 2]` of one draw of tokens, each length a part of the next."""
    tokens = law.draw(grid[-1], generator)
    asking = tokens[::share] @ head.query.T / law.dimension**0.5
    mean, covariance = (torch.stack(each).float() for each in zip(*limits, strict=True))
    keys, values = tokens @ head.key.T, tokens @ head.value.T
    errors = torch.empty(len(scales), len(grid), 2)
    for at, (n, out) in enumerate(
        zip(grid, prefix_attention(asking, keys, values, grid, torch.tensor(scales)), strict=True)
    ):
        asked = out[:, : -(-n // share)]
        errors[:, at, 0], errors[:, at, 1] = squared_errors(asked, n, mean, covariance)
    return errors


def sweep(
    law: Law,
    scales: Sequence[float],
    grid: Sequence[int],
    replicates: int,
    *,
    share: int = 8,
    seed: int = 0,
) -> Iterator[Tensor]:
    """The squared errors `[scales, lengths, 2]` of each replicate in turn."""
    check_replicates(replicates)
    if not 1 <= share <= grid[0] // 8:
        raise UserError(f"one in {share} tokens asks; 1 to {grid[0] // 8} is allowed with {grid[0]:,} tokens or more")
    if any(not 0 < scale < math.inf for scale in scales):
        raise UserError("scales must be positive and finite")
    head = Head.random(law.dimension, seed)
    limits = [head.limit_moments(law, scale, seed) for scale in scales]
    for number in range(replicates):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number + 1)
        yield replicate(law, head, scales, grid, limits, generator, share)


def rows(law: Law, scales: Sequence[float], grid: Sequence[int], errors: Tensor, seed: int = 0) -> list[Row]:
    """Rates of both moments at each scale from squared errors `[replicates, scales, lengths, 2]`."""
    head = Head.random(law.dimension, seed)
    x = torch.tensor(grid).double().log()
    found = []
    for at, scale in enumerate(scales):
        mean, covariance = (fit(x, errors[:, at, :, which]) for which in (0, 1))
        rms = errors[:, at].double().mean(0).clamp(min=0).sqrt()
        found.append(
            Row(
                scale=scale,
                horizon=head.horizon(law, scale),
                slope_mean=mean.slope,
                slope_mean_se=mean.error,
                slope_cov=covariance.slope,
                slope_cov_se=covariance.error,
                errors_mean=rms[:, 0].tolist(),
                errors_cov=rms[:, 1].tolist(),
            )
        )
    return found


def dense(law: Law, scales: Sequence[float], grid: Sequence[int], seed: int = 0) -> Tensor:
    """One replicate the plain way: for each length and scale all tokens ask, and all weights are written out.

    The specification of `replicate`, and what its speed is compared with.
    """
    head = Head.random(law.dimension, seed)
    tokens = law.draw(grid[-1], torch.Generator().manual_seed(seed * 1_000_003 + 1))
    errors = torch.empty(len(scales), len(grid), 2)
    for row, scale in enumerate(scales):
        mean, covariance = head.limit_moments(law, scale, seed)
        for at, n in enumerate(grid):
            x = tokens[:n]
            logits = (x @ head.query.T) @ (x @ head.key.T).T * (scale / law.dimension**0.5)
            out = logits.softmax(-1) @ (x @ head.value.T)
            errors[row, at, 0] = ((out.mean(0) - mean) ** 2).sum()
            errors[row, at, 1] = ((torch.cov(out.T) - covariance) ** 2).sum()
    return errors


def check_limit(law: Law, scale: float, *, tokens: int = 1_000_000, queries: int = 64, seed: int = 0) -> float:
    """How far attention over so many tokens is from the closed form, in its own standard errors, root mean square.

    About 1 if the closed form is right.
    """
    head = Head.random(law.dimension, seed)
    generator = torch.Generator().manual_seed(seed + 17)
    x = law.draw(queries, generator)
    b = scale * x.double() @ head.bilinear.T
    total = torch.zeros(queries, dtype=torch.float64)
    squares = torch.zeros_like(total)
    first, second = (torch.zeros(queries, law.dimension, dtype=torch.float64) for _ in range(2))
    cross = torch.zeros_like(first)
    for start in range(0, tokens, 50_000):
        y = law.draw(min(50_000, tokens - start), generator).double()
        w = (b @ y.T).exp()
        v = y @ head.value.double().T
        total += w.sum(-1)
        squares += (w**2).sum(-1)
        first += w @ v
        second += w**2 @ v**2
        cross += w**2 @ v
    found = first / total[:, None]
    # Of a ratio of means: sum of w² (v − found)² over the square of the sum of w.
    variance = (second - 2 * found * cross + found**2 * squares[:, None]) / total[:, None] ** 2
    return float((((found - head.limit(law, scale, x)) ** 2 / variance).mean()) ** 0.5)
