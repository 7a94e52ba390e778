"""Attention in two parts: near keys are scored by one pair of queries and keys, far keys by another.

A rotary model reads past its training length if far keys are scored at a distance that it knows. Each part is any
kernel's: the near one under a window, the far one as causal attention whose keys begin `window` tokens later. With the
log-sum-exp of each the two are attention to all keys:

    output = sigmoid(lse_1 − lse_2) · output_1 + sigmoid(lse_2 − lse_1) · output_2

Shape letters: B batch, H query heads, G key/value heads, M queries, N keys, D head size, E value size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels.registry import solve, without_autocast
from bayesattn.attention.problem import Problem, document_ranges
from bayesattn.attention.sinks import merge
from bayesattn.errors import is_whole, shown
from bayesattn.priors.window import WIDEST


def near_far_attention(
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    v: Tensor,
    window: int,
    log_prior: Tensor | None = None,
    *,
    far_keys: int | None = None,
    query_scale: Tensor | None = None,
    scale_prior: bool = True,
    softmax_scale: float | None = None,
    document_ids: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention whose queries and keys depend on whether their distance is below a window.

    The queries stand at the last of the keys' positions. For query i and key j of one document, at the distance d ≥ 0,

        logit_ij = r_i · (softmax_scale · near_q_i·near_k_j + log_prior(d))   if d < window
        logit_ij = r_i · (softmax_scale · far_q_i·far_k_j + log_prior(d))     if d ≥ window

    and the output is Σ_j softmax_j(logit_ij) · v_j. It is exact, of linear memory, and differentiable like
    `bayesian_attention`. A query that sees no key gets zeros.

    Args:
        near: q `[B, H, M, D]` and k `[B, G, n, D]`, where n is at least `near_keys(M, N, window)`: the last keys.
        far: q `[B, H, M, D]` and k `[B, G, n, D]`, where n is at least N − window: the first keys.
        v: `[B, G, N, E]`.
        window: distances of the near part.
        log_prior: `[H, n]` for the distances 0 … n−1, at least N of them; None for a uniform prior.
        far_keys: the far part sees only so many of the first keys of a document; None for all.
        query_scale: r, `[H, M]` or `[B, H, M]`; None for 1.
        scale_prior: False if r multiplies the content alone.
        softmax_scale: 1/√D by default.
        document_ids: `[B, N]`, as for `bayesian_attention`.
        implementation: as for `bayesian_attention`, for both parts.

    Returns:
        `[B, H, M, E]` in the dtype of q.

    Raises:
        TypeError, ValueError: as `bayesian_attention`; too few keys, or a window that is no whole number above 0.
    """
    if not is_whole(window, 1, WIDEST):
        raise ValueError(f"window is {shown(window)}; a whole number of tokens from 1 to {WIDEST:,} is needed")
    if far_keys is not None and not is_whole(far_keys, 1, WIDEST):
        raise ValueError(f"far_keys is {shown(far_keys)}; a whole number of keys from 1 to {WIDEST:,} is needed")
    queries, keys = near[0].shape[2], v.shape[2]
    needed = near_keys(queries, keys, window)
    for name, given, least in (("near", near, needed), ("far", far, max(0, keys - window))):
        if given[1].shape[2] < least:
            raise ValueError(f"the {name} part has {given[1].shape[2]} keys; at least {least} are needed")
    table = torch.zeros(near[0].shape[1], 0, device=v.device) if log_prior is None else log_prior
    of_near: Tensor | None = None  # if none of the last keys is beyond the window of a query
    if log_prior is not None or needed > window:
        reach = min(window, needed)
        inside = table.new_zeros(len(table), reach) if log_prior is None else table[:, :reach]
        of_near = torch.cat([inside, inside.new_full((len(table), needed - reach), -torch.inf)], 1)
    k = near[1][:, :, near[1].shape[2] - needed :]
    ids = None if document_ids is None else document_ids[:, keys - needed :]
    near_problem = make_problem(
        near[0], k, v[:, :, keys - needed :], of_near, query_scale=query_scale, scale_prior=scale_prior,
        softmax_scale=softmax_scale, document_ids=ids,
    )  # fmt: skip
    # Queries before this one have no far key.
    first = max(0, window - (keys - queries))
    if first >= queries:
        return solve(near_problem, implementation).out
    far_problem = make_problem(
        far[0][:, :, first:],
        far[1][:, :, : keys - window],
        v[:, :, : keys - window],
        None if log_prior is None else table[:, window:],
        query_scale=None if query_scale is None else query_scale[..., first:],
        scale_prior=scale_prior,
        softmax_scale=softmax_scale,
    )
    far_problem = _of_document(far_problem, document_ids, far_keys)
    of_near_rows = solve(replace(near_problem, needs_lse=True), implementation)
    of_far_rows = solve(replace(far_problem, needs_lse=True), implementation)
    near_lse, far_lse = of_near_rows.lse, of_far_rows.lse
    if near_lse is None or far_lse is None:
        raise ValueError(f"implementation {implementation!r} returns no log-sum-exp; use 'blockwise' or 'auto'")
    with without_autocast(v):
        wide = near_problem.dtype
        both, _ = merge(
            (of_near_rows.out[:, :, first:].to(wide), near_lse[:, :, first:]), (of_far_rows.out, far_lse), False
        )
        return torch.cat([of_near_rows.out[:, :, :first], both.to(v.dtype)], 2) if first else both.to(v.dtype)


def near_keys(num_queries: int, num_keys: int, window: int) -> int:
    """How many of the last keys some query sees in its window."""
    return min(num_keys, num_queries + window - 1)


def _of_document(problem: Problem, document_ids: Tensor | None, far_keys: int | None) -> Problem:
    """The problem of the far keys, for queries that see only those of their own document, or its first keys."""
    p = problem
    if document_ids is None:
        if far_keys is None or far_keys >= p.num_keys:
            return p
        # Keys are cut off, and queries stay where they are.
        table = p.log_prior[:, p.num_keys - far_keys :]
        return replace(p, k=p.k[:, :, :far_keys], v=p.v[:, :, :far_keys], log_prior=table)
    start, stop = document_ranges(document_ids)[:, -p.num_queries :].unbind(-1)
    stop = stop.clamp(max=p.num_keys)
    if far_keys is not None:
        stop = torch.minimum(stop, start + far_keys)
        p = replace(p, causal=False)  # the table hides the future; in causal problems a range ends there
    nothing = start >= stop
    ranges = start.masked_fill(nothing, p.num_keys), stop.masked_fill(nothing, 0)
    return replace(p, documents=torch.stack(ranges, -1))
