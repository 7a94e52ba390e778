"""One attention call after validation: what every kernel receives, and the geometry they share.

Shape letters: B batch, H query heads, G key/value heads, M queries, N keys, D head size, E value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.transforms import in_vmap
from bayesattn.errors import check_flags, is_whole, shown

# Stands for −inf inside kernels. It is finite, so that the softmax of a fully masked row is not NaN. No logit of a
# visible key exceeds LARGEST_LOGIT (kernels/finite.py checks that), so a masked key has no weight. A log-prior below
# −LARGEST_PRIOR hides its key.
MASKED = -1e30
LARGEST_LOGIT = 1e29
LARGEST_PRIOR = 1e28


class Solution(NamedTuple):
    """What a kernel returns: the output; and, where the problem asks for them, the log-sum-exp and the posterior."""

    out: Tensor  # [B, H, M, E] in the dtype of q, contiguous
    lse: Tensor | None = None  # [B, H, M] in working precision
    posterior: Tensor | None = None  # of blockwise alone, for its backward pass: [B · H · M · N] in working precision


@dataclass(frozen=True)
class Problem:
    """logit[b, h, i, j] = r[b, h, i] · (softmax_scale · q[b, h, i]·k[b, g, j] + log_prior[h, i − j + N − 1]).

    With a conditioned prior, `rows(parameters[b, h, i], shared, offset + i − j)` of its family is added to log_prior.

    `log_prior` covers exactly the distances that occur, lowest first; the entry of distance offset + i − j is
    i − j + N − 1. −inf hides a key, whatever the query scale. In causal attention the future has −inf, so a kernel need
    not treat causality; `causal` and `offset` let it skip keys that no query sees. Without `scale_prior`, r multiplies
    the content alone. `documents[b, i]` is the range of keys, [start, stop), in the document of query i, and (N, 0) for
    padding.
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
    needs_lse: bool = False  # whether the log-sum-exp is wanted too
    needs_posterior: bool = False  # whether blockwise should keep the posterior for its backward pass
    parameters: Tensor | None = None  # [1 or B, 1 or H, M, P], of each query's prior
    shared: tuple[Tensor, ...] = ()  # what the rows of all queries need; the first dimension of each is 1 or H
    family: str = ""  # of the conditioned prior

    def tensors(self) -> list[Tensor | None]:
        """The tensors, in the order of `TENSOR_FIELDS`, and then the shared ones."""
        return [*(getattr(self, name) for name in TENSOR_FIELDS), *self.shared]

    def settings(self) -> dict[str, Any]:
        """All that is not a tensor, by name."""
        return {name: getattr(self, name) for name in SETTING_FIELDS}

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], settings: dict[str, Any]) -> Problem:
        """The problem whose `tensors()` and `settings()` these are."""
        number = len(TENSOR_FIELDS)
        by_name: dict[str, Any] = dict(zip(TENSOR_FIELDS, tensors[:number], strict=True))
        return cls(**by_name, shared=tuple(tensors[number:]), **settings)  # type: ignore[arg-type]

    def of_heads(self, heads: slice) -> Problem:
        """The same problem for some query heads, one of each key/value head."""
        scale, parameters = self.query_scale, self.parameters
        return replace(
            self,
            q=self.q[:, heads],
            log_prior=self.log_prior[heads],
            query_scale=None if scale is None else scale[:, heads],
            parameters=parameters if parameters is None or parameters.shape[1] == 1 else parameters[:, heads],
            shared=tuple(x if len(x) == 1 else x[heads] for x in self.shared),
        )

    @property
    def without_rows(self) -> Problem:
        """The same problem under the static prior alone."""
        return self if self.parameters is None else replace(self, parameters=None, shared=(), family="")

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
        """How many keys, counted from the first, are visible to the queries before `last` by causality."""
        return max(0, min(self.num_keys, self.offset + last)) if self.causal else self.num_keys

    def prior_and_mask(self) -> tuple[Tensor, Tensor]:
        """`log_prior` in working precision with 0 for −inf, and MASKED there with 0 elsewhere."""
        table = self.log_prior.to(self.dtype)
        hidden = table.isneginf()
        return table.masked_fill(hidden, 0.0), torch.zeros_like(table).masked_fill_(hidden, MASKED)

    def fully_masked(self) -> Tensor | None:
        """`[1 or B, H, M]`: which queries see no key. None if every query sees its own position."""
        own = self.num_keys - 1 - self.offset  # entry of distance 0
        at_keys = self.offset >= 0 and self.offset + self.num_queries <= self.num_keys
        if (
            at_keys
            and self.num_queries
            and not self._may_miss_themselves()
            and not self.log_prior[:, own].isneginf().any()
        ):
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

    def _may_miss_themselves(self) -> bool:
        """Whether the ranges of some queries may be without their own position, as those of padding are, and those of
        sinks; True where values cannot be looked at."""
        documents = self.documents
        if documents is None:
            return False
        if not documents.is_cpu or torch.compiler.is_compiling() or in_vmap():
            return True
        start, stop = documents.unbind(-1)
        own = torch.arange(self.offset, self.offset + self.num_queries)
        return not bool(((start <= own) & (own < stop)).all())

    def solution(self, out_BHME: Tensor, lse_BHM: Tensor | None = None) -> Solution:
        """A kernel's result, after zeros and −inf are written for the queries that see no key."""
        if (masked := self.fully_masked()) is not None:
            out_BHME.masked_fill_(masked.unsqueeze(-1), 0.0)
            if lse_BHM is not None:
                lse_BHM.masked_fill_(masked, -torch.inf)
        return Solution(out_BHME.to(self.q.dtype), lse_BHM)


# The annotation of each field as it is written above. Operators make their signatures from it.
FIELD_TYPES = {field.name: str(field.type) for field in fields(Problem)}
TENSOR_FIELDS = tuple(name for name, kind in FIELD_TYPES.items() if kind.startswith("Tensor"))
SETTING_FIELDS = tuple(name for name in FIELD_TYPES if name not in (*TENSOR_FIELDS, "shared"))


# Tokens of one call: more do not fit into memory.
MOST_COUNTED = 2**36
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    """How many keys each query sees: `ScalableSoftmax` takes the logarithm of this.

    Causality and documents lower the counts. The prior does not, even if it is a window. `[num_queries]`, or
    `[B, num_queries]` with `document_ids` `[B, num_keys]`; `query_offset` is as for `bayesian_attention`, and
    `device` is where the counts are made when there are no ids.
    """
    check_flags(causal=causal)
    for name, number in (("num_queries", num_queries), ("num_keys", num_keys)):
        if not isinstance(number, torch.SymInt) and not is_whole(number, 0, MOST_COUNTED):
            raise ValueError(f"{name} is {shown(number)}; a whole number from 0 to {MOST_COUNTED:,} is needed")
    offset = num_keys - num_queries if query_offset is None else query_offset
    if not isinstance(offset, torch.SymInt) and not is_whole(offset, -(2**53), 2**53):
        raise ValueError(f"query_offset is {shown(offset)}; a whole number from -2**53 to 2**53 is needed")
    if document_ids is not None:
        _check_ids(document_ids, num_keys)
    device = device if document_ids is None else document_ids.device
    position = torch.arange(offset, offset + num_queries, device=device)
    if document_ids is None:
        return (position + 1).clamp(0, num_keys) if causal else torch.full_like(position, num_keys)
    start, stop = document_ranges(document_ids)[:, offset : offset + num_queries].unbind(-1)
    return ((torch.minimum(stop, position + 1) if causal else stop) - start).clamp(min=0)


def _check_ids(document_ids: Tensor, num_keys: int) -> None:
    if not isinstance(document_ids, Tensor) or document_ids.dtype not in ID_DTYPES:
        raise TypeError(f"document_ids is {shown(document_ids)}; a tensor of integers is needed, int64 for example")
    if document_ids.dim() != 2 or document_ids.shape[1] != num_keys:
        given = list(document_ids.shape)
        raise ValueError(f"document_ids has shape {given}; one id per key, [batch, {num_keys}], is needed")
