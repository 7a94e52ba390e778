"""Attention of the last tokens over one store of keys and values.

Shape letters: B batch, h query heads of the store, g key/value heads, n keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.api import bayesian_attention
from bayesattn.attention.cache.storage import Store
from bayesattn.priors.conditioned import GivenPrior, evaluate_rows


def attend_to_store(
    store: Store,
    q: Tensor,
    query_scale: Tensor | None,
    given: GivenPrior | None = None,
    *,
    scale_prior: bool,
    softmax_scale: float,
    padding: Tensor | None,
    most_padding: int,
    tolerance: float,
) -> Tensor:
    """Attention of queries `[B, h, M, D]`, which are of the latest positions, with scales `[1 or B, h, M, 1]`.

    `given` is the conditioned prior of the queries of all the layer's heads, if they have one.

    `padding` is how many of the first positions of each sequence are hidden, `[B]`, at most `most_padding`.
    """
    k, v = store.view()
    padded = padding is not None and most_padding > store.first
    sees_itself = not store.hides_own and most_padding < store.first + store.size
    assert store.table is not None
    if q.shape[2] == 1 and q.dtype == store.table.dtype and sees_itself:
        scaled_q = q if query_scale is None else q * query_scale
        if store.is_flat and not padded and given is None:
            return _one_query(scaled_q, k, v, None, softmax_scale)
        farthest_first = store.log_prior()
        bias = farthest_first if given is None else farthest_first + _rows(store, given, farthest_first)
        if query_scale is not None and scale_prior:
            bias = bias * query_scale
        if store.hides:
            bias = bias.masked_fill(farthest_first.isneginf(), -torch.inf)  # whatever the scale
        if padded:
            bias = bias.masked_fill(_is_padding(store, padding, q)[:, None, None], -torch.inf)
        return _one_query(scaled_q, k, v, bias, softmax_scale)
    table = store.log_prior()[0, :, 0].flip(-1)
    return bayesian_attention(
        q,
        k,
        v,
        table if given is None else given.heads(store.all.of_queries, table),
        query_scale=None if query_scale is None else query_scale.squeeze(-1).expand(len(q), -1, -1),
        scale_prior=scale_prior,
        softmax_scale=softmax_scale,
        document_ids=torch.where(_is_padding(store, padding, q), -1, 0) if padded else None,
        tolerance=tolerance,
    )


def _rows(store: Store, given: GivenPrior, farthest_first: Tensor) -> Tensor:
    """What a conditioned prior of one query adds to the static log-prior, `[1 or B, 1 or h, 1, n]`."""
    dtype, n = farthest_first.dtype, store.size
    some = given.heads(store.all.of_queries, farthest_first[0, :, 0])
    distances = torch.arange(n - 1, -1, -1, device=farthest_first.device).to(dtype)
    return evaluate_rows(
        some.family,
        some.parameters.to(dtype),
        tuple(x.to(dtype) for x in some.shared),
        distances.unsqueeze(0) if some.family.elementwise else distances,
    )


def _is_padding(store: Store, padding: Tensor | None, like: Tensor) -> Tensor:
    """Of the positions held, in each sequence, `[B, n]`."""
    assert padding is not None
    position = torch.arange(store.first, store.first + store.size, device=like.device)
    return position < padding.to(like.device)[:, None]


def _one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softmax_scale: float) -> Tensor:
    """Attention of one query `[B, h, 1, D]` with log-priors `[1 or B, h, 1, n]`, or without. Query heads that share
    keys are rows of one attention."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        q = q.squeeze(2).unflatten(1, (-1, group))
        bias = None if bias is None else bias.squeeze(2).unflatten(1, (-1, group))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax_scale)
    return out.flatten(1, 2).unsqueeze(2) if group > 1 else out
