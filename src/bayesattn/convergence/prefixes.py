"""Attention over the first n keys for every n of a grid, at many temperatures, in one pass over the keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Logits that stay in a core's cache while every temperature is applied to them.
QUERIES, KEYS = 256, 1024


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, grid: Sequence[int], scales: Tensor, log_prior: Tensor | None = None
) -> Iterator[Tensor]:
    """For each n of the grid, in rising order, attention of all queries over the first n keys: `[S, …, M, Dv]`.

    Args:
        q, k, v: `[…, M, D]`, `[…, N, D]` and `[…, N, Dv]`.
        grid: numbers of keys, rising, at most N.
        scales: `[S]`; logits are scale · q·k, computed once for all scales.
        log_prior: `[S, N]`, added to the logits, largest value 0.
    """
    ones = torch.ones_like(v[..., :1])
    v = torch.cat((v, ones), -1)  # the last column counts the weights
    sums = q.new_zeros(len(scales), *q.shape[:-1], v.shape[-1])
    peak = q.new_full(q.shape[:-1], -torch.inf)
    done = 0
    for n in grid:
        for start in range(done, n, KEYS):
            keys = slice(start, min(n, start + KEYS))
            k_tile, v_tile = k[..., keys, :].mT.contiguous(), v[..., keys, :].contiguous()
            for first in range(0, q.shape[-2], QUERIES):
                rows = (..., slice(first, first + QUERIES))
                logits = q[(*rows, slice(None))] @ k_tile
                higher = torch.maximum(peak[rows], logits.amax(-1))
                fade, peak[rows] = peak[rows] - higher, higher
                logits -= higher[..., None]
                weights = torch.empty_like(logits)
                for row, scale in enumerate(scales.tolist()):
                    torch.mul(logits, scale, out=weights)
                    if log_prior is not None:
                        weights += log_prior[row, keys]
                    held = sums[row][(*rows, slice(None))]
                    held *= (scale * fade).exp_()[..., None]
                    held += weights.exp_() @ v_tile
        done = n
        yield sums[..., :-1] / sums[..., -1:]
