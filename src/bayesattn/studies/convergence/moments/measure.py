"""How fast the mean and the covariance of attention outputs converge, depending on the horizon of the attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from bayesattn.errors import UserError
from bayesattn.schemas import Row
from bayesattn.studies.convergence.fits import check_replicates, fit
from bayesattn.studies.convergence.laws import Head, Law, generator_for
from bayesattn.studies.convergence.moments.run import Rate
from bayesattn.studies.convergence.prefixes import prefix_attention

LEAST_QUERIES = 32


def scales(least: float = 0.05, most: float = 50.0, number: int = 12) -> list[float]:
    """That many scales from the least to the most, in a geometric series."""
    return [float(s) for s in torch.logspace(math.log10(least), math.log10(most), number)]


def squared_errors(out: Tensor, tokens: int, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of the mean and the covariance of outputs `[…, m, d]`, against the given ones.

    The m queries are a random subset of all the tokens, which adds sampling noise to the squared errors. We estimate it
    from the spread of the outputs and subtract it. So the expectation is that of all tokens as queries.
    """
    m = out.shape[-2]
    centre = out.mean(-2)
    spread = out - centre[..., None, :]
    sample_covariance = spread.mT @ spread / (m - 1)
    of_mean = ((centre - mean) ** 2).sum(-1)
    of_covariance = ((sample_covariance - covariance) ** 2).sum((-2, -1))
    if m == tokens:
        return of_mean, of_covariance
    size = (spread**2).sum(-1)
    trace = size.sum(-1) / (m - 1)
    sample = torch.stack(((size**2).mean(-1), (sample_covariance**2).sum((-2, -1)), trace**2), -1).double()
    unbiased = torch.linalg.solve(_bias_matrix(m), sample[..., None])[..., 0]
    noise = unbiased @ (_covariance_variance(m) - _covariance_variance(tokens))
    return of_mean - (1 / m - 1 / tokens) * trace, of_covariance - noise.to(of_covariance)


def _covariance_variance(m: int) -> Tensor:
    """Expected squared error of the covariance of m draws, as coefficients of E‖z‖⁴, ‖C‖² and (tr C)²."""
    pairs = 1 / (m * (m - 1))
    return torch.tensor([1 / m, pairs - 1 / m, pairs], dtype=torch.float64)


def _bias_matrix(m: int) -> Tensor:
    """Expectations of the sample versions of E‖z‖⁴, ‖C‖² and (tr C)², for m draws centred at their mean.

    Row i has the coefficients of the three true values in the expectation of sample value i.
    """
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
    """Squared errors `[scales, lengths, 2]` of one draw of tokens; each length is a prefix of the next.

    Args:
        share: every `share`-th token is a query.
    """
    queries = tokens[::share] @ head.query.T / tokens.shape[1] ** 0.5
    mean, covariance = (torch.stack(each).float() for each in zip(*limits, strict=True))
    keys, values = tokens @ head.key.T, tokens @ head.value.T
    errors = torch.empty(len(scales), len(grid), 2)
    for at, (n, out) in enumerate(
        zip(grid, prefix_attention(queries, keys, values, grid, torch.tensor(scales)), strict=True)
    ):
        num_queries = -(-n // share)
        errors[:, at, 0], errors[:, at, 1] = squared_errors(out[:, :num_queries], n, mean, covariance)
    return errors


def sweep(
    law: Law,
    scales: Sequence[float],
    grid: Sequence[int],
    replicates: int,
    *,
    share: int = 8,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """Squared errors `[scales, lengths, 2]`, one replicate at a time, from replicate `first` on."""
    check_replicates(replicates)
    if grid[0] < LEAST_QUERIES * share:
        raise UserError(
            f"one in {share} of {grid[0]:,} tokens gives {grid[0] // share} queries; at least {LEAST_QUERIES} are "
            "needed"
        )
    for scale in scales:
        if not 0 < scale < math.inf:
            raise UserError(f"the scale is {scale:g}; it must be positive and finite")
    head = Head.random(law.dimension, seed)
    limits = [head.limit_moments(law, scale, seed) for scale in scales]
    for number in range(first, replicates):
        yield replicate(_tokens(law, grid, seed, number), head, scales, grid, limits, share)


def _tokens(law: Law, grid: Sequence[int], seed: int, number: int = 0) -> Tensor:
    return law.draw(grid[-1], generator_for(seed, "tokens", number))


def rows(law: Law, scales: Sequence[float], grid: Sequence[int], errors: Tensor, seed: int = 0) -> list[Rate]:
    """Rates of both moments at each scale, from squared errors `[replicates, scales, lengths, 2]`."""
    head = Head.random(law.dimension, seed)
    x = torch.tensor(grid).double().log()
    results = []
    for at, scale in enumerate(scales):
        mean, covariance = (fit(x, errors[:, at, :, which]) for which in (0, 1))
        rms = errors[:, at].double().mean(0).clamp(min=0).sqrt()
        results.append(
            Rate(
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
    return results


def dense(
    tokens: Tensor,
    head: Head,
    scales: Sequence[float],
    grid: Sequence[int],
    limits: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The specification of `replicate`: for each length and scale, dense attention with all tokens as queries."""
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
class Speed(Row):
    """Seconds of one replicate at all scales, and of `dense` at one of them.

    `ratio` is the time of `dense` at all scales over that of `replicate`. `error` is the largest relative difference of
    the two, with all tokens as queries.
    """

    seconds: float
    dense_seconds: float
    ratio: float
    error: float


def compare_dense(law: Law, scales: Sequence[float], grid: Sequence[int], share: int, seed: int = 0) -> Speed:
    """Time a replicate against `dense`, which is timed at one scale and extrapolated to all of them."""
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
        raise UserError(
            f"the results differ from those of dense attention by {error:.1e}; at most 1e-3 is allowed for timing"
        )
    return Speed(seconds, dense_seconds, dense_seconds * len(scales) / seconds, error)


def check_limit(law: Law, scale: float, *, tokens: int = 1_000_000, queries: int = 64, seed: int = 0) -> float:
    """Root mean square deviation of attention over `tokens` tokens from the closed form, in standard errors.

    It is about 1 if the closed form is right and the scale is so small that the weight is spread over many tokens.
    """
    head = Head.random(law.dimension, seed)
    generator = generator_for(seed, "check")
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
    out = first / total[:, None]
    # The variance of a ratio of means: the sum of w² (v − out)² over the squared sum of w.
    variance = (second - 2 * out * cross + out**2 * squares[:, None]) / total[:, None] ** 2
    return float((((out - head.limit(law, scale, x)) ** 2 / variance).mean()) ** 0.5)
