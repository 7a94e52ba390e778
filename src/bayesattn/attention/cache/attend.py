"""Attention of the last tokens over one store of keys and values.

Shape letters: B batch, h query heads of the store, g key/value heads, n keys, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.api import attention_with_lse, bayesian_attention
from bayesattn.attention.cache.storage import Store
from bayesattn.attention.kernels.sdpa import fused_attention
from bayesattn.priors.conditioned import GivenPrior, evaluate_rows


class Hidden(NamedTuple):
    """How many of the first positions of each sequence the stores hide: those of padding and of sinks."""

    counts: Tensor | None  # [B]; None if all are the same
    least: int
    most: int


def attend_to_store(
    store: Store,
    q: Tensor,
    query_scale: Tensor | None,
    given: GivenPrior | None = None,
    *,
    scale_prior: bool,
    softmax_scale: float,
    hidden: Hidden,
    tolerance: float,
    needs_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries `[B, h, M, D]`, which are of the latest positions, with scales `[1 or B, h, M, 1]`.

    `given` is the conditioned prior of the queries of all the layer's heads, if they have one. The log-sum-exp,
    `[B, h, M]`, is wanted or not.
    """
    k, v = store.view()
    skipped = 0
    if hidden.most > store.first:
        # What is hidden in all sequences is left out. With counts, queries must stand at positions of keys.
        most_skipped = store.size if hidden.counts is None else store.size - q.shape[2]
        skipped = max(0, min(hidden.least - store.first, most_skipped))
        k, v = (x.narrow(2, skipped, store.size - skipped) for x in (k, v))
    padded = hidden.counts is not None and hidden.most > store.first + skipped
    sees_itself = not store.hides_own and hidden.most < store.first + store.size
    is_fused = not needs_lse or (q.is_cpu and v.shape[-1] == q.shape[-1])
    assert store.table is not None
    if q.shape[2] == 1 and q.dtype == store.table.dtype and sees_itself and is_fused:
        scaled_q = q if query_scale is None else q * query_scale
        if store.size - skipped <= store.flat and not padded and given is None:
            return _one_query(scaled_q, k, v, None, softmax_scale, needs_lse)
        farthest_first = _log_prior(store, skipped)
        bias = farthest_first if given is None else farthest_first + _rows(store, given, farthest_first)
        if query_scale is not None and scale_prior:
            bias = bias * query_scale
        if store.hides:
            bias = bias.masked_fill(farthest_first.isneginf(), -torch.inf)  # whatever the scale
        if padded:
            bias = bias.masked_fill(_is_hidden(store, hidden, skipped, q)[:, None, None], -torch.inf)
        return _one_query(scaled_q, k, v, bias, softmax_scale, needs_lse)
    settings: dict[str, Any] = {
        "query_scale": None if query_scale is None else query_scale.squeeze(-1).expand(len(q), -1, -1),
        "scale_prior": scale_prior,
        "softmax_scale": softmax_scale,
        "document_ids": torch.where(_is_hidden(store, hidden, skipped, q), -1, 0) if padded else None,
        "tolerance": tolerance,
    }
    table = _log_prior(store, skipped)[0, :, 0].flip(-1)
    prior = table if given is None else given.heads(store.all.of_queries, table)
    if needs_lse:
        return attention_with_lse(q, k, v, prior, **settings)
    return bayesian_attention(q, k, v, prior, **settings), None


def _log_prior(store: Store, skipped: int) -> Tensor:
    """Of the distances to all that are held but the first, farthest first, `[1, h, 1, n]`."""
    table = store.log_prior()
    return table.narrow(3, skipped, store.size - skipped) if skipped else table


def _rows(store: Store, given: GivenPrior, farthest_first: Tensor) -> Tensor:
    """What a conditioned prior of one query adds to these static log-priors, `[1 or B, 1 or h, 1, n]`."""
    dtype, n = farthest_first.dtype, farthest_first.shape[3]
    some = given.heads(store.all.of_queries, farthest_first[0, :, 0])
    distances = torch.arange(n - 1, -1, -1, device=farthest_first.device).to(dtype)
    return evaluate_rows(
        some.family,
        some.parameters.to(dtype),
        tuple(x.to(dtype) for x in some.shared),
        distances.unsqueeze(0) if some.family.elementwise else distances,
    )


def _is_hidden(store: Store, hidden: Hidden, skipped: int, like: Tensor) -> Tensor:
    """Of the positions held that are not left out, in each sequence, `[B, n]`."""
    assert hidden.counts is not None
    position = torch.arange(store.first + skipped, store.first + store.size, device=like.device)
    return position < hidden.counts.to(like.device)[:, None]


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softmax_scale: float, needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of one query `[B, h, 1, D]` with log-priors `[1 or B, h, 1, n]`, or without. Query heads that share
    keys are rows of one attention."""
    group, lse = q.shape[1] // k.shape[1], None
    if group > 1:
        q = q.squeeze(2).unflatten(1, (-1, group))
        bias = None if bias is None else bias.squeeze(2).unflatten(1, (-1, group))
    if needs_lse:
        out, lse = fused_attention(q, k, v, attn_mask=bias, scale=softmax_scale)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax_scale)
    if group > 1:
        out, lse = out.flatten(1, 2).unsqueeze(2), None if lse is None else lse.flatten(1, 2).unsqueeze(2)
    return out, lse
