"""The query scale of the latest queries. A step of a decoder looks it up in a table, where there can be one.

Shape letters: B batch, H query heads, M the latest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.inputs import can_check, check_query_scale
from bayesattn.attention.scaling import InklingScaling, Llama4Scaling, MistralScaling, ScalableSoftmax

# Counts of a table beyond those that are asked for, and the most queries that use it.
AHEAD, MOST_ROWS = 256, 64
# Query scales of which count and tensors decide r.
COUNTED = (ScalableSoftmax, Llama4Scaling, MistralScaling, InklingScaling)


class QueryScales(NamedTuple):
    """r of some queries, `[1 or B, H, M, 1]`."""

    r: Tensor
    at_most: float  # |r|; infinite where values are not looked at
    are_positive: bool  # False where values are not looked at


class ScaleTable(NamedTuple):
    """r for the counts of visible keys from `first` on."""

    first: int
    scales: QueryScales  # [1, H, n, 1]
    positive_from: int  # all are positive from this count on

    def has(self, first: int, stop: int, q: Tensor) -> bool:
        """Whether it has these counts, for queries such as q."""
        r = self.scales.r
        return self.first <= first and stop <= self.first + r.shape[2] and r.dtype == _dtype(q)

    def look_up(self, visible: slice | Tensor) -> QueryScales:
        """r of these counts, a range or `[B, M]`."""
        if isinstance(visible, slice):
            r = self.scales.r.narrow(2, visible.start - self.first, visible.stop - visible.start)
            return QueryScales(r, self.scales.at_most, visible.start >= self.positive_from)
        r = self.scales.r[0, :, visible - self.first].transpose(0, 1)
        return QueryScales(r, self.scales.at_most, self.scales.are_positive)


def can_look_up(query_scale: object, q: Tensor) -> bool:
    """Whether the count and tensors that are compared now and then decide r, and the queries are few."""
    return type(query_scale) in COUNTED and q.shape[2] <= MOST_ROWS


def make_table(query_scale: Callable[[Tensor], Tensor], first: int, stop: int, q: Tensor) -> ScaleTable:
    """A table of these counts and some more, for queries such as q."""
    scales = evaluate(query_scale, torch.arange(first, stop + AHEAD, device=q.device), q)
    others = (scales.r <= 0.0).any(1).flatten().nonzero()
    return ScaleTable(first, scales, first + int(others[-1]) + 1 if len(others) else first)


def evaluate(query_scale: Callable[[Tensor], Tensor], visible: Tensor, q: Tensor) -> QueryScales:
    """r for counts of visible keys, `[n]` or `[B, n]`, and for queries such as q `[B, H, *, D]`; or an error."""
    r = query_scale(visible.double() if q.dtype == torch.float64 else visible)
    if not isinstance(r, Tensor):
        raise TypeError(f"the query_scale module returned a {type(r).__name__}; a tensor is needed")
    r = check_query_scale(r, q[:, :, :1].expand(-1, -1, visible.shape[-1], -1)).to(_dtype(q)).unsqueeze(-1)
    if not can_check(r) or not r.numel():
        return QueryScales(r, torch.inf, False)
    least, most = torch.stack(r.aminmax()).tolist()
    return QueryScales(r, max(-least, most), least > 0.0)


def _dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
