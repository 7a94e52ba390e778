"""Decoding one token at a time: a `LayerCache` against a full cache with plain SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bayesattn as ba
from bayesattn.studies.bench.inputs import LARGEST_ERROR
from bayesattn.studies.bench.measure import seconds_in_turn

# Tokens decoded in one round, as many as a cache can take back. So costs that come once in so many tokens count too.
DECODED = 64
# Tokens of a chunk of the prompt, and the last queries of each, enough for the cache to estimate their spread.
CHUNK, QUERIES = 4096, 256


@dataclass(frozen=True)
class Decoded:
    """Seconds of a token, bytes, and the largest relative error of the tokens of a round against float64.

    `seconds` is None if the error is too large.
    """

    seconds: float | None
    full_seconds: float
    bytes: int
    full_bytes: int
    error: float


def decode(
    prior: ba.Prior, scale: Callable[[Tensor], Tensor] | None, tokens: int, size: int, tolerance: float, seed: int
) -> Decoded:
    """Decode `DECODED` tokens a round; with the one in the middle of them a query sees `tokens` keys.

    Every round decodes the same tokens: the caches are cropped between rounds, which is not timed.
    """
    torch.manual_seed(seed)
    first = tokens - DECODED // 2
    q, k, v = torch.randn(3, 1, prior.num_heads, first + DECODED, size)
    positions = range(first, first + DECODED)
    cache = ba.LayerCache(prior, query_scale=scale, tolerance=tolerance, rollback=DECODED)
    cache.reserve(first + DECODED)
    for start in range(0, first, CHUNK):
        stop = min(first, start + CHUNK)
        cache.attend(q[:, :, max(start, stop - QUERIES) : stop], k[:, :, start:stop], v[:, :, start:stop])
    full_k, full_v = k.clone(), v.clone()
    outputs: list[Tensor] = []

    def with_ours() -> None:
        outputs[:] = [cache.attend(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in positions]

    def with_full_cache() -> None:
        for i in positions:
            full_k[:, :, i], full_v[:, :, i] = k[:, :, i], v[:, :, i]
            scaled_dot_product_attention(q[:, :, i : i + 1], full_k[:, :, : i + 1], full_v[:, :, : i + 1])

    with torch.no_grad():
        seconds = seconds_in_turn(
            {"ours": with_ours, "full": with_full_cache}, prepare={"ours": lambda: cache.crop(first)}
        )
        expected = ba.bayesian_attention(
            q[:, :, first:].double(), k.double(), v.double(), prior,
            query_scale=scale, implementation="reference",
        )  # fmt: skip
    error = float(((torch.cat(outputs, 2).double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return Decoded(
        seconds["ours"] / DECODED if error <= LARGEST_ERROR else None,
        seconds["full"] / DECODED,
        cache.bytes,
        cache.full_bytes,
        error,
    )
