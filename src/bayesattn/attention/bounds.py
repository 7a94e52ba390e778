"""The bound on content logits that the plan and the cache share.

By Cauchy-Schwarz the content logits of query i lie within ±u_i, with

    u_i = |r_i| · |softmax_scale| · ‖q_i‖ · max_j ‖k_j‖.

Scoring one key exactly bounds the row's log-sum-exp from below. It is the nearest of the keys that the prior favours.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

# The norms and products are rounded. A part in a thousand covers that at any size.
RELATIVE_SLACK = 1.001
ABSOLUTE_SLACK = 1e-3
# The likeliest key is the nearest of those within this many nats of the prior's peak.
NEAR_PEAK = 1.0

Number = TypeVar("Number", float, Tensor)


def content_bound(
    query_norm: Number, key_norm: Number, softmax_scale: float, query_scale: Number | None = None
) -> Number:
    """u from ‖q‖, max‖k‖ and, if it is to be included, r; all broadcast. Rounding is covered."""
    bound = query_norm * key_norm
    if query_scale is not None:
        bound = abs(query_scale) * bound
    slope, intercept = bound_of_product(softmax_scale)
    return bound * slope + intercept


def bound_of_product(softmax_scale: float) -> tuple[float, float]:
    """Slope and intercept of the bound u as a function of ‖q‖·max‖k‖, without the query scale."""
    return abs(softmax_scale) * RELATIVE_SLACK, ABSOLUTE_SLACK


def likeliest_entry(log_prior: Tensor, away: Tensor) -> Tensor:
    """Index of each head's likeliest key in a table `[H, X]` that is 0 at its peak; `away` is |distance|, `[X]`."""
    return away.masked_fill(log_prior < -NEAR_PEAK, away.max() + 1).argmin(-1)
