"""Rates of convergence in the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from bayesattn.errors import UserError
from bayesattn.studies.convergence.fits import check_replicates, fit
from bayesattn.studies.convergence.laws import generator_for
from bayesattn.studies.convergence.layers import Layer
from bayesattn.studies.convergence.model.run import HeadRate, Sampling
from bayesattn.studies.convergence.moments.measure import squared_errors
from bayesattn.studies.convergence.prefixes import prefix_attention


def sample(tokens: int, n: int, sampling: Sampling, generator: Generator) -> Tensor:
    """Positions of n sampled tokens of a text. Each prefix of the result is a sample of the same kind.

    With `iid` each token comes from anywhere; with `window` every second one comes from a window of neighbours.
    """
    positions = torch.randint(tokens, (n,), generator=generator)
    if sampling == "window":
        first = int(torch.randint(tokens, (1,), generator=generator))
        positions[::2] = (first + torch.arange(len(positions[::2]))) % tokens
    return positions


def sweep(
    layers: Sequence[Layer],
    grid: Sequence[int],
    replicates: int,
    sampling: Sampling = "iid",
    seed: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """Squared errors `[layers, heads, lengths, 2]`, one replicate at a time from `first` on.

    The limit is all tokens of the text.
    """
    check_replicates(replicates)
    if sampling not in ("iid", "window"):
        raise UserError(f"the sampling is {sampling!r}; iid and window are allowed")
    tokens = layers[0].q.shape[1]
    if grid[-1] > tokens:
        raise UserError(f"the longest sample has {grid[-1]:,} tokens; at most the {tokens:,} of the text are allowed")
    one = torch.ones(1)
    limits = []
    for layer in layers:
        (out,) = next(prefix_attention(layer.q, layer.k, layer.v, [tokens], one))
        spread = out - out.mean(1, keepdim=True)
        limits.append((out.mean(1), spread.mT @ spread / tokens))
    for number in range(first, replicates):
        generator = generator_for(seed, "tokens", number)
        positions = sample(tokens, grid[-1], sampling, generator)
        errors = torch.empty(len(layers), layers[0].q.shape[0], len(grid), 2)
        for at, (layer, (mean, covariance)) in enumerate(zip(layers, limits, strict=True)):
            q, k, v = (x[:, positions] for x in (layer.q, layer.k, layer.v))
            for length, (n, (out,)) in enumerate(zip(grid, prefix_attention(q, k, v, grid, one), strict=True)):
                errors[at, :, length, 0], errors[at, :, length, 1] = squared_errors(out[:, :n], n, mean, covariance)
        yield errors


def rows(layers: Sequence[Layer], grid: Sequence[int], errors: Tensor) -> list[HeadRate]:
    """Rates of the heads of each layer, then of the layer, from errors `[replicates, layers, heads, lengths, 2]`.

    The squared error of a layer is the sum over its heads.
    """
    x = torch.tensor(grid).double().log()
    rates = []
    for at, layer in enumerate(layers):
        horizons = layer.horizons()
        for head, horizon in [*enumerate(horizons), (None, max(horizons))]:
            squared = errors[:, at].sum(1) if head is None else errors[:, at, head]
            mean, covariance = fit(x, squared[..., 0]), fit(x, squared[..., 1])
            rates.append(HeadRate(at, head, horizon, mean.slope, mean.error, covariance.slope, covariance.error))
    return rates
