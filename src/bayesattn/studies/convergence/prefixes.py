"""Attention over the first n keys for every n of a grid, at many temperatures, in one pass over the keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Sequence[int],
    scales: Tensor,
    log_prior: Tensor | None = None,
    *,
    tile: tuple[int, int] = (256, 1024),
) -> Iterator[Tensor]:
    """Attention of all queries over the first n keys, `[S, …, M, Dv]`, for each n of the grid in turn.

    Args:
        q, k, v: `[…, M, D]`, `[…, N, D]` and `[…, N, Dv]`.
        grid: numbers of keys, in rising order, at most N.
        scales: `[S]`; logits are scale · q·k, and q·k is computed once for all scales.
        log_prior: `[S, N]`, added to the logits; its largest value is 0.
        tile: queries and keys of one tile of logits. The default fits into the cache of a CPU core.
    """
    query_tile, key_tile = tile
    ones = torch.ones_like(v[..., :1])
    v = torch.cat((v, ones), -1)  # the last column sums the weights
    sums = q.new_zeros(len(scales), *q.shape[:-1], v.shape[-1])
    peak = q.new_full(q.shape[:-1], -torch.inf)
    done = 0
    for n in grid:
        for start in range(done, n, key_tile):
            keys = slice(start, min(n, start + key_tile))
            k_tile, v_tile = k[..., keys, :].mT.contiguous(), v[..., keys, :].contiguous()
            for first in range(0, q.shape[-2], query_tile):
                rows = (..., slice(first, first + query_tile))
                logits = q[(*rows, slice(None))] @ k_tile
                higher = torch.maximum(peak[rows], logits.amax(-1))
                fade, peak[rows] = peak[rows] - higher, higher
                logits -= higher[..., None]
                weights = torch.empty_like(logits)
                for row, scale in enumerate(scales.tolist()):
                    torch.mul(logits, scale, out=weights)
                    if log_prior is not None:
                        weights += log_prior[row, keys]
                    partial_sums = sums[row][(*rows, slice(None))]
                    partial_sums *= (scale * fade).exp_()[..., None]
                    partial_sums += weights.exp_() @ v_tile
        done = n
        yield sums[..., :-1] / sums[..., -1:]
