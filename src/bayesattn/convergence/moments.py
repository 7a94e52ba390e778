"""How fast the mean and the covariance of attention's outputs converge, by the horizon of the attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bayesattn.convergence.fits import check_replicates, fit
from bayesattn.convergence.laws import Head, Law, numbers
from bayesattn.convergence.prefixes import prefix_attention
from bayesattn.errors import UserError

LEAST_ASKING = 32


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
    centre = out.mean(-2)
    spread = out - centre[..., None, :]
    found = spread.mT @ spread / (m - 1)
    of_mean = ((centre - mean) ** 2).sum(-1)
    of_covariance = ((found - covariance) ** 2).sum((-2, -1))
    if m == tokens:
        return of_mean, of_covariance
    size = (spread**2).sum(-1)
    trace = size.sum(-1) / (m - 1)
    seen = torch.stack(((size**2).mean(-1), (found**2).sum((-2, -1)), trace**2), -1).double()
    truth = torch.linalg.solve(_seen_of_truth(m), seen[..., None])[..., 0]
    extra = truth @ (_covariance_variance(m) - _covariance_variance(tokens))
    return of_mean - (1 / m - 1 / tokens) * trace, of_covariance - extra.to(of_covariance)


def _covariance_variance(m: int) -> Tensor:
    """The expected squared error of a covariance of m draws, as weights of E‖z‖⁴, ‖C‖² and (tr C)²."""
    pairs = 1 / (m * (m - 1))
    return torch.tensor([1 / m, pairs - 1 / m, pairs], dtype=torch.float64)


def _seen_of_truth(m: int) -> Tensor:
    """What m draws centred at their mean show of E‖z‖⁴, ‖C‖² and (tr C)² on average, as a matrix of weights."""
    a, pairs = (m - 1) / m, 1 / (m * (m - 1))
    others = (m - 1) * (m - 2) / m**4
    fourth = [a**4 + (m - 1) / m**4, 4 * a**2 * (m - 1) / m**2 + 2 * others, 2 * a**2 * (m - 1) / m**2 + others]
    square = [1 / m, 1 - 1 / m + pairs, pairs]
    trace = [1 / m, 2 * pairs, 1 - 1 / m]
    return torch.tensor([fourth, square, trace], dtype=torch.float64)


def replicate(
    tokens: Tensor,
    head: Head,
    scales: Sequence[float],
    grid: Sequence[int],
    limits: Sequence[tuple[Tensor, Tensor]],
    share: int,
) -> Tensor:
    """Squared errors `[scales, lengths, 2]` of one draw of tokens, each length a part of the next."""
    asking = tokens[::share] @ head.query.T / tokens.shape[1] ** 0.5
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
    if grid[0] < LEAST_ASKING * share:
        raise UserError(
            f"one in {share} tokens asks and the shortest length is {grid[0]:,}; at least {LEAST_ASKING} must ask"
        )
    if any(not 0 < scale < math.inf for scale in scales):
        raise UserError("scales must be positive and finite")
    head = Head.random(law.dimension, seed)
    limits = [head.limit_moments(law, scale, seed) for scale in scales]
    for number in range(replicates):
        yield replicate(_tokens(law, grid, seed, number), head, scales, grid, limits, share)


def _tokens(law: Law, grid: Sequence[int], seed: int, number: int = 0) -> Tensor:
    return law.draw(grid[-1], numbers(seed, "tokens", number))


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


def dense(
    tokens: Tensor,
    head: Head,
    scales: Sequence[float],
    grid: Sequence[int],
    limits: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`replicate` the plain way: for each length and scale all tokens ask, and all weights are written out.

    The specification, and what its speed is compared with.
    """
    errors = torch.empty(len(scales), len(grid), 2)
    for row, (scale, (mean, covariance)) in enumerate(zip(scales, limits, strict=True)):
        for at, n in enumerate(grid):
            x = tokens[:n]
            logits = (x @ head.query.T) @ (x @ head.key.T).T * (scale / x.shape[1] ** 0.5)
            out = logits.softmax(-1) @ (x @ head.value.T)
            errors[row, at, 0] = ((out.mean(0) - mean) ** 2).sum()
            errors[row, at, 1] = ((torch.cov(out.T) - covariance) ** 2).sum()
    return errors


@dataclass(frozen=True)
class Speed:
    """Seconds of one replicate at all scales, and the plain way at one of them; how far both are apart, all asking."""

    seconds: float
    dense_seconds: float
    ratio: float
    error: float


def compare_dense(law: Law, scales: Sequence[float], grid: Sequence[int], share: int, seed: int = 0) -> Speed:
    """Time a replicate against `dense`, whose one scale is counted as often as there are scales."""
    head = Head.random(law.dimension, seed)
    limits = [head.limit_moments(law, scale, seed) for scale in scales]
    tokens = _tokens(law, grid, seed)
    short = grid[: max(1, len(grid) // 2)]
    exact = replicate(tokens[: short[-1]], head, scales[:1], short, limits[:1], share=1)
    start = perf_counter()
    replicate(tokens, head, scales, grid, limits, share)
    between = perf_counter()
    plain = dense(tokens, head, scales[:1], grid, limits[:1])
    seconds, dense_seconds = between - start, perf_counter() - between
    error = float(((exact - plain[:, : len(short)]) / plain[:, : len(short)]).abs().max())
    if error > 1e-3:
        raise UserError(f"the fast way is {error:.1e} off the dense one; it is not timed")
    return Speed(seconds, dense_seconds, dense_seconds * len(scales) / seconds, error)


def check_limit(law: Law, scale: float, *, tokens: int = 1_000_000, queries: int = 64, seed: int = 0) -> float:
    """How far attention over so many tokens is from the closed form, in its own standard errors, root mean square.

    About 1 if the closed form is right and the scale so small that no few tokens have all the weight.
    """
    head = Head.random(law.dimension, seed)
    generator = numbers(seed, "check")
    x = law.draw(queries, generator)
    b = scale * x.double() @ head.bilinear.T
    total = torch.zeros(queries, dtype=torch.float64)
    squares = torch.zeros_like(total)
    first, second, cross = (torch.zeros(queries, law.dimension, dtype=torch.float64) for _ in range(3))
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
