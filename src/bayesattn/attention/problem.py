"""One attention call after validation: what every kernel receives, and the geometry they share.

Shape letters: B batch, H query heads, G key/value heads, M queries, N keys, D head size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Stands for −inf inside kernels: finite, so that a row of nothing but MASKED has a softmax. The log-prior of a visible
# key is at least LOWEST, which leaves room for a query scale of a hundred.
MASKED = -1e30
LOWEST = -1e28


@dataclass(frozen=True)
class Problem:
    """logit[b, h, i, j] = r[b, h, i] · (softmax_scale · q[b, h, i]·k[b, g, j] + log_prior[h, i − j + N − 1]).

    `log_prior` covers exactly the distances that occur, lowest first; the entry of distance offset + i − j is
    i − j + N − 1. −inf means never visible, whatever the query scale; in causal attention that includes the future, so
    a kernel need not know about causality, though `causal` and `offset` let it skip what nobody sees. With
    `scale_prior` off, r multiplies the content alone. `documents[b, i]` is the range of keys, [start, stop), in the
    document of query i, and (N, 0) for padding.
    """

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, G, N, D]
    v: Tensor  # [B, G, N, E]
    log_prior: Tensor  # [H, M + N − 1]
    query_scale: Tensor | None  # [1 or B, H, M]
    documents: Tensor | None  # [B, M, 2]
    softmax_scale: float
    scale_prior: bool
    causal: bool
    offset: int  # position of the first query
    tolerance: float = 0.0  # posterior mass per query that may be left out

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of logits, softmax and accumulation: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def visible_keys(self, last: int) -> int:
        """How many keys, from the first on, causality lets the queries before `last` see."""
        return max(0, min(self.num_keys, self.offset + last)) if self.causal else self.num_keys

    def prior_and_mask(self) -> tuple[Tensor, Tensor]:
        """`log_prior` in working precision with 0 for −inf, and MASKED there with 0 elsewhere."""
        table = self.log_prior.to(self.dtype)
        hidden = table.isneginf()
        return table.masked_fill(hidden, 0.0), torch.zeros_like(table).masked_fill_(hidden, MASKED)

    def blind(self) -> Tensor | None:
        """`[1 or B, H, M]`: which queries have no visible key at all. None if every one sees its own position."""
        own = self.num_keys - 1 - self.offset  # entry of distance 0
        at_keys = self.offset >= 0 and self.offset + self.num_queries <= self.num_keys
        if self.documents is None and at_keys and self.num_queries and not self.log_prior[:, own].isneginf().any():
            return None
        queries = torch.arange(self.num_queries, device=self.q.device)
        visible = self.log_prior.isneginf().logical_not().cumsum(-1, dtype=torch.int32)
        visible = torch.nn.functional.pad(visible, (1, 0))  # visible[h, x]: how many of the entries before x
        if self.documents is None:
            return (visible[:, queries + self.num_keys] <= visible[:, queries]).unsqueeze(0)
        start, stop = self.documents.unbind(-1)
        padding = stop <= start
        above = visible[:, (queries + self.num_keys - start).clamp(min=0)]
        below = visible[:, queries + self.num_keys - stop]
        return (above <= below).transpose(0, 1) | padding.unsqueeze(1)

    def zero_blind(self, x_BHMF: Tensor) -> Tensor:
        """`x` with zeros, written into it, for the queries that see nothing."""
        blind = self.blind()
        return x_BHMF if blind is None else x_BHMF.masked_fill_(blind.unsqueeze(-1), 0.0)


def document_ranges(document_ids: Tensor) -> Tensor:
    """Range of each token's document, `[B, N, 2]`, from ids `[B, N]`; padding has negative ids and the range (N, 0)."""
    n = document_ids.shape[1]
    position = torch.arange(n, device=document_ids.device).expand_as(document_ids)
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    edge = changes.new_ones(len(document_ids), 1)
    start = position.where(torch.cat([edge, changes], 1), 0).cummax(1).values
    stop = (position + 1).where(torch.cat([changes, edge], 1), n).flip(1).cummin(1).values.flip(1)
    padding = document_ids < 0
    return torch.stack([start.masked_fill(padding, n), stop.masked_fill(padding, 0)], -1)


def visible_counts(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    query_offset: int | None = None,
    document_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """How many keys each query may look at: what `ScalableSoftmax` takes the logarithm of.

    Counts are by causality and documents, not by the prior: a window does not lower them. `[num_queries]`, or
    `[B, num_queries]` with `document_ids` `[B, num_keys]`; `query_offset` is as for `bayesian_attention`, and
    `device` is where the counts are made when there are no ids.
    """
    offset = num_keys - num_queries if query_offset is None else query_offset
    device = device if document_ids is None else document_ids.device
    position = torch.arange(offset, offset + num_queries, device=device)
    if document_ids is None:
        return (position + 1).clamp(0, num_keys) if causal else torch.full_like(position, num_keys)
    start, stop = document_ranges(document_ids)[:, offset : offset + num_queries].unbind(-1)
    return ((torch.minimum(stop, position + 1) if causal else stop) - start).clamp(min=0)
