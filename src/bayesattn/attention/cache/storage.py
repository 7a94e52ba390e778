"""Where the keys and values of a layer are held: in one store, until it pays to keep fewer positions of some heads.

Each store costs every token a call of SDPA and some copies. So it is split once that frees many positions.

Shape letters: B batch, G key/value heads, M new tokens, D head size; g key/value heads of one store, h query heads
that use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bayesattn.attention.inputs import evaluate_prior
from bayesattn.priors.base import Prior

# The shortest table of log-priors that is kept.
LEAST_TABLE = 1024

Index = slice | Tensor


class Room(NamedTuple):
    """Spare positions of a store: `least`, or one for each `per_held` positions that it holds if that is more.

    Each time they are used up, all that the store holds is copied.
    """

    least: int = 64
    per_held: int = 8

    def beside(self, size: int) -> int:
        """Spare positions beside `size` that are held."""
        return max(self.least, size // self.per_held)


DEFAULT_ROOM = Room()


@dataclass(frozen=True)
class Heads:
    """Some heads of a store, as what selects them from tensors."""

    of_keys: Index  # from the key/value heads of the layer
    of_queries: Index  # from its query heads: those that use them
    query_numbers: list[int]
    in_store: Index  # from the key/value heads of the store
    kv_index: Tensor  # [h, 1]: the key/value head in the store of each of the query heads


@dataclass
class Store:
    """Positions `first` … `first` + `size` − 1 of some heads, in tensors with room for more."""

    heads: Tensor  # [g], key/value heads
    query_heads: Tensor  # [h]
    k: Tensor  # [B, g, capacity, D]
    v: Tensor
    room: Room = DEFAULT_ROOM
    first: int = 0  # position of the oldest key
    begin: int = 0  # its index in the tensors
    size: int = 0
    span: int | None = None  # distances from here on are not needed; None: all are
    spans: list[int | None] = field(default_factory=list)  # the same of each head; empty before the first plan
    complete_from: int = 0  # for queries from here on the latest eviction kept all that its span asked for
    table: Tensor | None = None  # the log-prior, [1, h, 1, n], farthest distance first
    hides: bool = False  # whether some of the table is −inf
    hides_own: bool = False  # whether that is at distance 0
    flat: int = 0  # so many of the nearest distances have a log-prior of 0
    protected: int = 0  # up to this index another state, which may be restored, has what the tensors hold
    split_at: int | None = None  # the size from which on a split pays
    group: int = field(init=False)  # query heads per key/value head
    all: Heads = field(init=False)
    bounded: Heads | None = field(init=False)  # those that have a span; all of them before the first plan

    def __post_init__(self) -> None:
        self.group = len(self.query_heads) // len(self.heads)
        self.all = self.bounded = self._some(range(len(self.heads)))

    @property
    def bytes(self) -> int:
        """Of the tensors, their spare room included."""
        return self.k.nbytes + self.v.nbytes

    def view(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions held."""
        return self.k.narrow(2, self.begin, self.size), self.v.narrow(2, self.begin, self.size)

    def set_spans(self, spans: list[int | None], worth: int) -> None:
        """Set the span of each head. A split that frees `worth` positions, over all heads, pays."""
        finite = [span for span in spans if span is not None]
        self.spans, self.span = spans, max(finite) if len(finite) == len(spans) else None
        chosen = [head for head, span in enumerate(spans) if span is not None]
        self.bounded = self._some(chosen) if chosen else None
        sizes = [span + math.ceil(worth / number) for span, number in self._divisions()]
        self.split_at = min((size for size in sizes if self.span is None or size <= self.span), default=None)

    def split(self, worth: int) -> list[Store]:
        """A store of the heads with short spans and one of the others, which may be split again; or this one."""
        if self.split_at is None or self.size < self.split_at:
            return [self]
        size = self.size if self.span is None else min(self.size, self.span)
        short_span, _ = max(self._divisions(), key=lambda division: division[1] * (size - division[0]))
        (k, v), parts = self.view(), []
        is_short = [span is not None and span <= short_span for span in self.spans]
        for short in (True, False):
            members = [head for head, each in enumerate(is_short) if each == short]
            heads = torch.tensor(members, device=k.device)
            query_heads = self.query_heads.unflatten(0, (-1, self.group))[heads].flatten()
            part = Store(
                self.heads[heads], query_heads, k[:, heads], v[:, heads], self.room, self.first, size=self.size
            )
            part.complete_from = self.complete_from
            part.set_spans([self.spans[head] for head in members], worth)
            parts += part.split(worth)
        return parts

    def _divisions(self) -> list[tuple[int, int]]:
        """The longest span of some heads, and their number, for each set of heads of shorter spans than the others."""
        finite = [span for span in self.spans if span is not None]
        return [(span, sum(each <= span for each in finite)) for span in {*finite} - {self.span}]

    def per_query(self, x: Tensor, dim: int) -> Tensor:
        """What is of key/value heads in this dimension, for each query head."""
        return x if self.group == 1 else x.repeat_interleave(self.group, dim)

    def make_room(self, new: int, reserve: int) -> None:
        """Move unless so many positions can be added. What moves gets room for `reserve` positions, or all it keeps."""
        end = self.begin + self.size
        # Copies that are made in inference mode cannot be written to outside of it.
        if end + new > self.k.shape[2] or end < self.protected or self.k.is_inference():
            kept = reserve if self.span is None else min(reserve, self.span + self.room.beside(self.span))
            self._move(max(self.size + new + self.room.beside(self.size), kept))

    def append(self, k: Tensor, v: Tensor, reserve: int) -> None:
        """Add the next positions, as `make_room` says."""
        new = k.shape[2]
        self.make_room(new, reserve)
        end = self.begin + self.size
        self.k[:, :, end : end + new] = k
        self.v[:, :, end : end + new] = v
        self.size += new

    def evict_before(self, position: int) -> None:
        """Drop all keys before `position`, and give memory back once twice the spare room is unused."""
        evicted = min(self.size, max(0, position - self.first))
        self.first, self.begin, self.size = self.first + evicted, self.begin + evicted, self.size - evicted
        room = self.room.beside(self.size)
        if evicted and self.size + 2 * room < self.k.shape[2]:
            self._move(self.size + room)

    def has_table(self, like: Tensor) -> bool:
        """Whether there are log-priors for all that is held, precise enough for queries such as these."""
        table = self.table
        return table is not None and table.shape[3] >= self.size and table.dtype.itemsize >= like.dtype.itemsize

    def make_table(self, prior: Prior, like: Tensor) -> None:
        """Evaluate the log-prior for all that is held, and for more to come."""
        n = max(LEAST_TABLE, 1 << (self.size - 1).bit_length())
        dtype = torch.promote_types(like.dtype, torch.float32)
        distances = torch.arange(n - 1, -1, -1, device=like.device, dtype=dtype)
        self.table = evaluate_prior(prior, distances)[None, self.query_heads, None]
        others = self.table.any(1).flatten().nonzero()
        self.flat = n - 1 - int(others[-1]) if len(others) else n
        self.hides = bool(self.table.isneginf().any())
        self.hides_own = bool(self.table[..., -1].isneginf().any())

    def log_prior(self) -> Tensor:
        """Of the distances from the latest position to all that are held, farthest first, `[1, h, 1, size]`."""
        assert self.table is not None
        return self.table.narrow(3, self.table.shape[3] - self.size, self.size)

    def _some(self, members: Sequence[int]) -> Heads:
        """These of the heads, counted in the store."""
        chosen = torch.tensor(members, device=self.heads.device)
        queries = (chosen[:, None] * self.group + torch.arange(self.group, device=chosen.device)).flatten()
        of_queries = self.query_heads[queries]
        return Heads(
            _index(self.heads[chosen]), _index(of_queries), of_queries.tolist(), _index(chosen),
            queries[:, None] // self.group,
        )  # fmt: skip

    def _move(self, capacity: int) -> None:
        k, v = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (self.k, self.v))
        k[:, :, : self.size], v[:, :, : self.size] = self.view()
        self.k, self.v, self.begin, self.protected = k, v, 0, 0


class Storage:
    """The stores of a layer: one at first, and more once that pays. With `same_positions` it stays one."""

    def __init__(self, same_positions: bool, room: Room = DEFAULT_ROOM) -> None:
        self.same_positions, self.room = same_positions, room
        self.stores: list[Store] = []
        self.worth = 0  # positions freed that are worth a split
        self.order: Tensor | None = None  # of the layer's query heads among those of all stores, if it is not the same

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
        self.stores = [Store(heads, torch.arange(query_heads, device=k.device), k[:, :, :0], v[:, :, :0], self.room)]

    def append(self, k: Tensor, v: Tensor, reserve: int) -> None:
        """Add the next positions, `[B, G, M, D]`."""
        has_all = len(self.stores) == 1
        for store in self.stores:
            some = (k, v) if has_all else (select(k, store.all.of_keys), select(v, store.all.of_keys))
            store.append(*some, reserve)

    def join(self, parts: list[Tensor]) -> Tensor:
        """What each store has for its query heads, `[B, h, *, *]`, or all in turn, in the order of the layer."""
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return joined if self.order is None else joined.index_select(1, self.order)

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

    def set_spans(self, spans: list[int | None], least_freed: int = 0) -> None:
        """Give every head its span. A store is split once that frees so many positions, averaged over all heads."""
        self.worth = least_freed * len(spans)
        for store in self.stores:
            store.set_spans([spans[h] for h in store.heads.tolist()], self.worth)

    def evict(self, length: int) -> None:
        """Drop the keys that no query from position `length` on needs."""
        if not self.same_positions and any(s.split_at is not None and s.size >= s.split_at for s in self.stores):
            self.stores = [part for store in self.stores for part in store.split(self.worth)]
            order = torch.cat([store.query_heads for store in self.stores]).argsort()
            self.order = None if isinstance(_index(order), slice) else order
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
        """Of each key/value head. With `same_positions` that is the longest for all."""
        spans = {
            h: store.span if self.same_positions or not store.spans else span
            for store in self.stores
            for h, span in zip(store.heads.tolist(), store.spans or store.heads.tolist(), strict=True)
        }
        return [spans[h] for h in sorted(spans)]


def select(x: Tensor, index: Index, dim: int = 1) -> Tensor:
    """The entries of `index` in a dimension."""
    if isinstance(index, Tensor):
        return x.index_select(dim, index)
    return x if index.stop - index.start == x.shape[dim] else x.narrow(dim, index.start, index.stop - index.start)


T = TypeVar("T")


def shallow_copy(x: T) -> T:
    """`copy.copy` of an object without slots, in a tenth of the time: each token needs some."""
    new = object.__new__(type(x))
    new.__dict__ = x.__dict__.copy()
    return new


def _index(heads: Tensor) -> Index:
    """The same as a slice if they are neighbours: tensors are slower."""
    first, number = int(heads[0]), len(heads)
    neighbours = torch.equal(heads, torch.arange(first, first + number, device=heads.device))
    return slice(first, first + number) if neighbours else heads
