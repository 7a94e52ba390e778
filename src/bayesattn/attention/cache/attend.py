"""Attention of the last tokens over one store of keys and values.

Shape letters: B batch, h query heads of the store, g key/value heads, n keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.api import bayesian_attention
from bayesattn.attention.cache.storage import Store
from bayesattn.priors.base import Prior


def attend_to_store(
    store: Store,
    q: Tensor,
    query_scale: Tensor | None,
    prior: Prior,
    *,
    scale_prior: bool,
    softmax_scale: float,
    padding: Tensor | None,
    most_padding: int,
    tolerance: float,
) -> Tensor:
    """Attention of queries `[B, h, M, D]`, which are of the latest positions, with scales `[1 or B, h, M]`.

    `padding` is how many of the first positions of each sequence are hidden, `[B]`, at most `most_padding`.
    """
    k, v = store.view()
    farthest_first = store.log_prior(prior, q)
    document_ids = None
    if padding is not None and most_padding > store.first:
        position = torch.arange(store.first, store.first + store.size, device=q.device)
        document_ids = torch.where(position < padding.to(q.device)[:, None], -1, 0)
    if q.shape[2] == 1 and document_ids is None and not store.hides and q.dtype == farthest_first.dtype:
        scaled = q if query_scale is None else q * query_scale.unsqueeze(-1)
        return _one_query(scaled, k, v, farthest_first, query_scale if scale_prior else None, softmax_scale)
    return bayesian_attention(
        q,
        k,
        v,
        farthest_first.flip(-1),
        query_scale=None if query_scale is None else query_scale.expand(len(q), -1, -1),
        scale_prior=scale_prior,
        softmax_scale=softmax_scale,
        document_ids=document_ids,
        tolerance=tolerance,
    )


def _one_query(
    q_Bh1D: Tensor, k: Tensor, v: Tensor, log_prior_hn: Tensor, prior_scale: Tensor | None, softmax_scale: float
) -> Tensor:
    """The step of a decoder, without detours: the bias is a row of the table, and query heads that share keys are rows
    of one attention."""
    group = q_Bh1D.shape[1] // k.shape[1]
    bias = log_prior_hn.unflatten(0, (-1, group)).unsqueeze(0)  # [1, g, group, n]
    if prior_scale is not None:
        bias = bias * prior_scale.unflatten(1, (-1, group))
    rows = q_Bh1D.squeeze(2).unflatten(1, (-1, group))
    out = scaled_dot_product_attention(rows, k, v, attn_mask=bias.to(rows.dtype), scale=softmax_scale)
    return out.flatten(1, 2).unsqueeze(2)
