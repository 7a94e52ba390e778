"""One token of each sequence, as most tokens come: what stays the same from token to token is prepared.

`State` says what a token does. A step does the same to a copy of a state, with arrays of numpy. It declines what it is
not prepared for. The call then goes the general way, from another copy: a step that declined has written at most to
spare room, to rows of `Pending` that no state has yet, and to what it has prepared itself.

As long as nothing is evicted no answer depends on the certificate. What there is to know of queries and keys is then
worked out for a block of tokens at a time. Of a single token the sum of all squares is enough: it is finite, and small.

Shape letters: B batch, H query heads, G key/value heads, D head size; of one store g key/value heads, each with R query
heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.cache.arrays import Array, as_arrays
from bayesattn.attention.cache.scales import QueryScales
from bayesattn.attention.cache.sinks import HeldSinks
from bayesattn.attention.cache.spans import Token
from bayesattn.attention.cache.state import State
from bayesattn.attention.cache.storage import Store
from bayesattn.attention.kernels.sdpa import fused_attention

FLOATS = (torch.float32, torch.float64)
# Tokens of a block, and the largest norm in it.
BLOCK, LARGEST_NORM = 64, 1e6


class Pending(NamedTuple):
    """The tokens of a block. Each is a row of its own, which is written once."""

    rows: Array  # [n, all that a token has]
    q: Array  # [n, B, H, D], the same memory
    k: Array  # [n, B, G, D]
    v: Array
    start: int  # position of the first
    until: int  # with so many positions something else is due

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any], start: int, until: int) -> Pending:
        """A block for q, k and v of these shapes, `[B, *, 1, D]`."""
        sizes = [math.prod(shape) for shape in shapes]
        rows, ends = np.empty((BLOCK, sum(sizes)), dtype), list(accumulate(sizes))
        q, k, v = (
            rows[:, end - size : end].reshape(BLOCK, *shape[:2], shape[3])
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        )
        return cls(rows, q, k, v, start, until)

    def write(self, position: int, q: Array, k: Array, v: Array) -> bool:
        """Whether the token is finite and small."""
        index = position - self.start
        self.q[index], self.k[index], self.v[index] = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        row = self.rows[index]
        return bool(row.dot(row) <= LARGEST_NORM**2 / 2)  # rounding of the sum is far less than half

    def queries_and_keys(self, stop: int) -> tuple[Tensor, Tensor]:
        """Those of the tokens before a position, `[B, *, M, D]`."""
        q, k = (torch.from_numpy(x[: stop - self.start]).permute(1, 2, 0, 3) for x in (self.q, self.k))
        return q, k


@dataclass(frozen=True)
class Part:
    """One store, until it is split."""

    query_heads: Tensor  # of the store: another tensor says that it was split
    held: Tensor  # the keys that `k` is the memory of
    k: Array  # [B, g, capacity, D]
    v: Array
    of_keys: slice | Array  # from the key/value heads of the layer
    q: Tensor  # [B, g, R, D], of the token
    columns: int  # of the store's table
    table: Array  # of log-priors, [1, g, R, columns], farthest distance first
    scales: Array | None  # what multiplies them, [n, 1, g, R, 1]
    room: Array | None  # for the products

    @classmethod
    def of(cls, store: Store, q: Tensor, scales: Array | None) -> Part:
        """Of a store that has a table. Its part of the queries is `q`, and scales are `[n, 1, h, 1]`, or None."""
        _, kv_heads, rows, _ = q.shape
        of_keys = store.all.of_keys
        assert store.table is not None
        columns = store.table.shape[3]
        table = store.table.numpy().reshape(1, kv_heads, rows, columns)
        room = None
        if scales is not None and store.flat < columns:
            scales = scales.reshape(-1, 1, kv_heads, rows, 1)
            room = np.empty((1, kv_heads, rows, columns), table.dtype)
        indices = of_keys.numpy() if isinstance(of_keys, Tensor) else of_keys
        k, v = store.k.numpy(), store.v.numpy()
        return cls(store.query_heads, store.k, k, v, indices, q, columns, table, scales, room)

    def with_room(self, store: Store, reserve: int) -> Part | None:
        """The part of a store that has room for one more position, perhaps in other memory; or decline."""
        if store.query_heads is not self.query_heads or store.size >= self.columns:
            return None
        store.make_room(1, reserve)
        if store.k is self.held:
            return self
        return replace(self, held=store.k, k=store.k.numpy(), v=store.v.numpy())

    def attend(
        self, store: Store, k: Array, v: Array, row: int, softmax_scale: float, sinks: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Append one position to the store, and attend to all that it holds after the first positions, the sinks.

        Return the attention of the token, `[B, g, R, D]`, and with sinks its log-sum-exp, `[B, g, R]`.
        """
        end = store.begin + store.size
        self.k[:, :, end], self.v[:, :, end] = k[:, self.of_keys, 0], v[:, self.of_keys, 0]
        store.size += 1
        skipped = 0 if sinks is None else max(0, sinks - store.first)
        bias = None
        if (size := store.size - skipped) > store.flat:
            log_prior = self.table[..., self.columns - size :]
            if self.scales is not None and self.room is not None:
                log_prior = np.multiply(log_prior, self.scales[row], out=self.room[..., :size])
            bias = torch.from_numpy(log_prior)
        seen = slice(store.begin + skipped, end + 1)
        keys, values = torch.from_numpy(self.k[:, :, seen]), torch.from_numpy(self.v[:, :, seen])
        if sinks is None:
            out = scaled_dot_product_attention(self.q, keys, values, attn_mask=bias, scale=softmax_scale)
            return out, None
        out, lse = fused_attention(self.q, keys, values, attn_mask=bias, scale=softmax_scale)
        return out, lse


@dataclass(frozen=True)
class PreparedSinks:
    """The sinks, with the key/value heads in the order of the stores."""

    held: HeldSinks
    softmax_scale: float
    k: Array  # [B, G, D, C]
    v: Array  # [B, G, C, D]
    log_prior: Array | None  # [1, G, R, C]; None if all are 0

    @classmethod
    def of(cls, held: HeldSinks, stores: Sequence[Store], softmax_scale: float) -> PreparedSinks:
        heads, query_heads = (torch.cat(x) for x in zip(*((s.heads, s.query_heads) for s in stores), strict=True))
        k, v = held.k[:, heads].mT, held.v[:, heads]
        log_prior = held.log_prior[query_heads].unflatten(0, (1, len(heads), -1))
        return cls(held, softmax_scale, k.numpy(), v.numpy(), log_prior.numpy() if log_prior.any() else None)

    def merge(self, q: Array, outs: Array, lse: Array, scales: Array | None) -> Array:
        """Attention to sinks and to all others, `[B, G, R, D]`, of queries `[B, G, R, D]` times their scales.

        `outs` and `lse` are attention to the others and its log-sum-exp `[B, G, R, 1]`; scales multiply log-priors.
        """
        logits = np.matmul(q, self.k)
        logits *= self.softmax_scale
        if self.log_prior is not None:
            logits += self.log_prior if scales is None else self.log_prior * scales
        largest = np.maximum(logits.max(-1, keepdims=True), lse)
        weights, of_others = np.exp(logits - largest), np.exp(lse - largest)
        merged: Array = np.matmul(weights, self.v)
        merged += of_others * outs
        merged /= weights.sum(-1, keepdims=True) + of_others
        return merged


@dataclass
class Step:
    """What is prepared. It lasts until a store is split, or the log-priors or the scales end."""

    shapes: list[tuple[int, ...]]  # of q, k and v
    dtype: torch.dtype
    parts: list[Part]
    rows: Array  # [B, H, D], the queries of the token in the order of the stores, where the parts read them
    order: slice | Array  # of the query heads in the stores
    softmax_scale: float
    scales: QueryScales | None
    by_row: Array | None  # those that are positive, [n, 1, H, 1]
    first: int  # the number of visible keys that row 0 is for
    sinks: PreparedSinks | None
    scales_of_sinks: Array | None  # what multiplies their log-priors, [n, 1, G, R, 1]
    least_length: int  # with fewer positions a query does not see all sinks, or its likeliest key may be one

    @classmethod
    def after(cls, state: State, q: Tensor, k: Tensor, v: Tensor) -> Step | None:
        """Prepare for tokens such as these, which the state has had; None if they always go the general way."""
        known, stores, held = state.certificate, state.storage.stores, state.sinks
        assert known is not None
        plain = state.padding is None and not known.only_hides
        least_length = 0
        if held is not None:
            least_length = held.count + state.farthest_likely
            plain = plain and not held.hides and held.log_prior.dtype == q.dtype and state.length >= least_length
        alike = q.shape[2] == k.shape[2] == 1 and q.shape[3] == v.shape[3] and q.is_cpu and q.dtype in FLOATS
        arrays = as_arrays(q, k, v) if plain and alike and len(q) else None
        if arrays is None or any(s.table is None or s.hides_own or s.table.dtype != q.dtype for s in stores):
            return None
        scales, by_row, first = None, None, 0
        if known.query_scale is not None:
            table = state.scale_table
            if table is None or state.length < table.positive_from:
                return None
            first, scales = table.positive_from, table.scales
            by_row = scales.r.permute(2, 0, 1, 3)[first - table.first :].numpy()
        heads = torch.cat([store.query_heads for store in stores])
        rows = torch.empty(len(q), len(heads), q.shape[3], dtype=q.dtype)
        parts, begin = [], 0
        for store in stores:
            end = begin + len(store.query_heads)
            of_prior = by_row[:, :, store.query_heads.numpy()] if by_row is not None and known.scale_prior else None
            parts.append(Part.of(store, rows[:, begin:end].unflatten(1, (-1, store.group)), of_prior))
            begin = end
        order = slice(None) if state.storage.order is None else heads.numpy()
        if by_row is not None:
            by_row = by_row[:, :, order]
        sinks = None if held is None else PreparedSinks.of(held, stores, known.softmax_scale)
        of_sinks = None
        if by_row is not None and sinks is not None and known.scale_prior:
            of_sinks = by_row.reshape(len(by_row), 1, sinks.k.shape[1], -1, 1)
        return cls(
            [x.shape for x in arrays], q.dtype, parts, rows.numpy(), order, known.softmax_scale, scales, by_row, first,
            sinks, of_sinks, least_length,
        )  # fmt: skip

    @property
    def largest_scale(self) -> float:
        return 1.0 if self.scales is None else self.scales.at_most

    def arrays_of(self, q: Tensor, k: Tensor, v: Tensor) -> list[Array] | None:
        """Tokens of the kind that the step is for, or None."""
        arrays = as_arrays(q, k, v)
        if arrays is None or [x.shape for x in arrays] != self.shapes:
            return None
        return arrays if all(x.dtype == self.rows.dtype for x in arrays) else None

    @np.errstate(all="ignore")
    def attend(self, state: State, arrays: list[Array], rollback: int) -> tuple[Tensor, State] | None:
        """The attention of a token, `[B, H, 1, D]`, and the state after it; or decline."""
        state = state.copy()
        q, k, v = arrays
        stores, row = state.storage.stores, state.length + 1 - self.first
        if len(stores) != len(self.parts) or not (self.by_row is None or 0 <= row < len(self.by_row)):
            return None
        held = None if self.sinks is None else self.sinks.held
        if state.sinks is not held or state.length < self.least_length:
            return None
        pending = state.pending or self._new_block(state, rollback)
        if pending is not None and pending.write(state.length, q, k, v):
            state.pending = pending
            state.length += 1
        elif self._take_note(state, arrays):
            pending = None
        else:
            return None
        if self.by_row is None:
            self.rows[:] = q[:, self.order, 0]
        else:
            np.multiply(q[:, self.order, 0], self.by_row[row], out=self.rows)
        outs, lses, sinks = [], [], None if held is None else held.count
        for number, store in enumerate(stores):
            part = self.parts[number].with_room(store, state.reserved)
            if part is None:
                return None
            self.parts[number] = part
            out, lse = part.attend(store, k, v, row, self.softmax_scale, sinks)
            outs.append(out)
            lses.append(lse)
        if self.sinks is not None:
            outs = [self._with_sinks(self.sinks, outs, lses, row)]
        if stores[0].group > 1:
            outs = [out.reshape(len(out), -1, 1, out.shape[3]) for out in outs]
        out = state.storage.join(outs)
        if pending is None or state.length >= pending.until:
            state.evict(rollback)
        # What a store has moved away from is not kept.
        same_memory = len(stores) == len(state.storage.stores) and all(
            store.k is part.held for store, part in zip(state.storage.stores, self.parts, strict=True)
        )
        state.step = self if same_memory else None
        return out, state

    def _with_sinks(self, sinks: PreparedSinks, outs: list[Tensor], lses: list[Any], row: int) -> Tensor:
        """What stores have and the sinks in one, `[B, G, R, D]`, with the heads in the order of the stores."""
        of_others, lse = (
            x[0].numpy() if len(x) == 1 else np.concatenate([each.numpy() for each in x], 1) for x in (outs, lses)
        )
        scales = None if self.scales_of_sinks is None else self.scales_of_sinks[row]
        return torch.from_numpy(sinks.merge(self.rows.reshape(of_others.shape), of_others, lse[..., None], scales))

    def _new_block(self, state: State, rollback: int) -> Pending | None:
        """For the next tokens; None if they must be looked at one by one."""
        stores, start = state.storage.stores, state.length
        if any(store.first > 0 for store in stores):
            return None
        known = state.certificate
        assert known is not None
        can_split = not state.storage.same_positions
        due = [store.split_at for store in stores if can_split and store.split_at is not None]
        due += [store.span + rollback for store in stores if store.span is not None]
        if known.planned_spread is not None:
            due.append(known.planned_length // 2 + 1)
        elif start < known.limits.least_kept:
            due.append(known.limits.least_kept)
        until = min(start + BLOCK, *due) if due else start + BLOCK
        if (
            until <= start + 1
            or not known.keeps_logits_small(LARGEST_NORM, self.largest_scale, LARGEST_NORM)
            or state.may_overflow(self.dtype, self.scales)
        ):
            return None
        state.largest_value = max(state.largest_value, LARGEST_NORM)
        return Pending.of(self.shapes, self.rows.dtype, start, until)

    def _take_note(self, state: State, arrays: list[Array]) -> bool:
        """Whether one token needs no evicted key and can be computed; it is then part of what the state knows."""
        known, stores = state.certificate, state.storage.stores
        assert known is not None
        token = Token.of_arrays(arrays, known.needs_content(stores))
        if token is None:
            return False
        state.length += 1
        state.add_numbers(token)
        return (
            known.covers(stores, token, True, state.length)
            and known.keeps_logits_small(max(token.queries), self.largest_scale)
            and not state.may_overflow(self.dtype, self.scales)
        )
