"""Where the keys and values of a layer are held: one store for each class of heads that keep the same positions.

Shape letters: B batch, G key/value heads, M new tokens, D head size; g key/value heads of one store, h query heads
that use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from bayesattn.attention.inputs import evaluate_prior
from bayesattn.priors.base import Prior

# Spare room of a store, in positions, and as a share of what it holds.
LEAST_ROOM, SHARE_OF_ROOM = 64, 8
# The shortest table of log-priors that is kept.
LEAST_TABLE = 1024
# Heads share a store if their spans agree to about this factor; spans below the second number all agree.
SPAN_RATIO, SHORT_SPAN = 4, 64


@dataclass
class Store:
    """Positions `first` … `first` + `size` − 1 of some heads, in tensors with room for more."""

    heads: Tensor  # [g], key/value heads
    query_heads: Tensor  # [h]
    k: Tensor  # [B, g, capacity, D]
    v: Tensor
    first: int = 0  # position of the oldest key
    begin: int = 0  # its index in the tensors
    size: int = 0
    span: int | None = None  # distances from here on are not needed; None: all are
    complete_from: int = 0  # for queries from here on the latest eviction kept all that its span asked for
    table: Tensor | None = None  # the log-prior, [h, n], farthest distance first
    hides: bool = False  # whether some of the table is −inf
    protected: int = 0  # up to this index another state, which may be restored, has what the tensors hold
    kv_index: Tensor = field(init=False)  # [h, 1]: which of `heads` each query head uses

    def __post_init__(self) -> None:
        self.kv_index = torch.arange(len(self.query_heads), device=self.heads.device)[:, None] // self.group

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return len(self.query_heads) // len(self.heads)

    @property
    def bytes(self) -> int:
        """Of the tensors, their spare room included."""
        return self.k.nbytes + self.v.nbytes

    def view(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions held."""
        held = slice(self.begin, self.begin + self.size)
        return self.k[:, :, held], self.v[:, :, held]

    def append(self, k: Tensor, v: Tensor, reserve: int) -> None:
        """Add the next positions. Tensors that must grow get room for `reserve` positions at least."""
        new, end = k.shape[2], self.begin + self.size
        if end + new > self.k.shape[2] or end < self.protected:
            self._move(max(_with_room(self.size, new), reserve))
            end = self.size
        self.k[:, :, end : end + new] = k
        self.v[:, :, end : end + new] = v
        self.size += new

    def evict_before(self, position: int) -> None:
        """Drop all keys before `position`, and give memory back once half of it is unused."""
        evicted = min(self.size, max(0, position - self.first))
        self.first, self.begin, self.size = self.first + evicted, self.begin + evicted, self.size - evicted
        room = _with_room(self.size, 0)
        if evicted and max(self.size * 2, room) < self.k.shape[2]:
            self._move(room)

    def log_prior(self, prior: Prior, like: Tensor) -> Tensor:
        """Of the distances from the latest position to all that are held, farthest first, `[h, size]`."""
        if self.table is None or self.table.shape[1] < self.size or self.table.dtype.itemsize < like.dtype.itemsize:
            n = max(LEAST_TABLE, 1 << (self.size - 1).bit_length())
            dtype = torch.promote_types(like.dtype, torch.float32)
            distances = torch.arange(n - 1, -1, -1, device=like.device, dtype=dtype)
            self.table = evaluate_prior(prior, distances)[self.query_heads]
            self.hides = bool(self.table.isneginf().any())
        return self.table[:, self.table.shape[1] - self.size :]

    def _move(self, capacity: int) -> None:
        k, v = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (self.k, self.v))
        k[:, :, : self.size], v[:, :, : self.size] = self.view()
        self.k, self.v, self.begin, self.protected = k, v, 0, 0


class Storage:
    """The stores of a layer: one at first, and one for each class of spans once these are known.

    With `same_positions` all heads stay in one store.
    """

    def __init__(self, same_positions: bool) -> None:
        self.same_positions = same_positions
        self.stores: list[Store] = []

    def copy(self) -> Storage:
        """One that changes on its own. Both have the same tensors.

        Only unused room is written to, and what `remove_last` gave up: `protect` keeps that for the other one.
        """
        new = shallow_copy(self)
        new.stores = [shallow_copy(store) for store in self.stores]
        return new

    def start(self, k: Tensor, v: Tensor, query_heads: int) -> None:
        """Make an empty store for keys and values such as these."""
        heads = torch.arange(k.shape[1], device=k.device)
        self.stores = [Store(heads, torch.arange(query_heads, device=k.device), k[:, :, :0], v[:, :, :0])]

    def append(self, k: Tensor, v: Tensor, reserve: int) -> None:
        """Add the next positions, `[B, G, M, D]`; heads that keep everything get room for `reserve` positions."""
        for store in self.stores:
            some = slice(None) if len(self.stores) == 1 else store.heads
            store.append(k[:, some], v[:, some], reserve if store.span is None else 0)

    def protect(self) -> None:
        """From now on never overwrite the present keys and values, also not after some are taken back."""
        for store in self.stores:
            store.protected = max(store.protected, store.begin + store.size)

    def unprotect(self) -> None:
        """Nothing else needs what the tensors hold any more."""
        for store in self.stores:
            store.protected = 0

    def remove_last(self, tokens: int) -> None:
        """Drop the latest positions."""
        for store in self.stores:
            store.size -= tokens

    def reorder(self, index: Tensor) -> None:
        """Let sequence b be what sequence `index[b]` was."""
        for store in self.stores:
            batch = index.to(store.k.device)
            store.k, store.v = store.k.index_select(0, batch), store.v.index_select(0, batch)
            store.protected = 0

    def set_spans(self, spans: list[int | None]) -> None:
        """Give every store the longest span of its heads, after splitting the one store of the beginning."""
        if len(self.stores) == 1 and not self.same_positions and self.stores[0].span is None:
            self.stores = _split_by_span(self.stores[0], spans)
        for store in self.stores:
            of_heads = [spans[h] for h in store.heads.tolist()]
            store.span = None if None in of_heads else max(s for s in of_heads if s is not None)

    def evict(self, length: int) -> None:
        """Drop the keys that no query from position `length` on needs."""
        for store in self.stores:
            if store.span is not None and length - store.span + 1 > store.first:
                store.evict_before(length - store.span + 1)
                store.complete_from = length

    @property
    def is_protected(self) -> bool:
        """Whether another state needs what some of the tensors hold."""
        return any(store.protected for store in self.stores)

    @property
    def shapes(self) -> tuple[list[int], list[int]] | None:
        """`[B, G, D]` of the keys and of the values; None before the start."""
        if not self.stores:
            return None
        heads = sum(store.k.shape[1] for store in self.stores)
        k, v = self.stores[0].k, self.stores[0].v
        return [len(k), heads, k.shape[3]], [len(v), heads, v.shape[3]]

    @property
    def batch(self) -> int:
        """Sequences; 0 before the start."""
        return len(self.stores[0].k) if self.stores else 0

    @property
    def first(self) -> int:
        """The oldest position that any head keeps."""
        return min((store.first for store in self.stores), default=0)

    @property
    def bytes(self) -> int:
        """Held now, spare room included."""
        return sum(store.bytes for store in self.stores)

    @property
    def bytes_per_position(self) -> int:
        """Of all heads."""
        return sum(s.k[:, :, :1].nbytes + s.v[:, :, :1].nbytes for s in self.stores)

    @property
    def spans(self) -> list[int | None]:
        """Of each key/value head."""
        spans = {h: store.span for store in self.stores for h in store.heads.tolist()}
        return [spans[h] for h in sorted(spans)]


T = TypeVar("T")


def shallow_copy(x: T) -> T:
    """`copy.copy` of an object without slots, in a tenth of the time: each token needs some."""
    new = object.__new__(type(x))
    vars(new).update(vars(x))
    return new


def _split_by_span(store: Store, spans: list[int | None]) -> list[Store]:
    """One store for each class of heads whose spans nearly agree."""
    classes: dict[int | None, list[int]] = {}
    for head, span in zip(store.heads.tolist(), spans, strict=True):
        size = None if span is None else math.ceil(math.log(max(span, SHORT_SPAN), SPAN_RATIO))
        classes.setdefault(size, []).append(head)
    if len(classes) == 1:
        return [store]
    k, v = store.view()
    parts = []
    for members in classes.values():
        heads = torch.tensor(members, device=k.device)
        query_heads = (heads[:, None] * store.group + torch.arange(store.group, device=k.device)).flatten()
        parts.append(Store(heads, query_heads, k[:, heads], v[:, heads], first=store.first, size=store.size))
    return parts


def _with_room(size: int, new: int) -> int:
    return size + new + max(LEAST_ROOM, size // SHARE_OF_ROOM)
