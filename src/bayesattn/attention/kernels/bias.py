"""Log-priors and masks of tiles, made from the table without an index for each logit.

Two forms are without copies. By *entry*, row i of a tile has one column for each entry of the table that the tile uses:
what belongs to an entry stands in one column, so that the prior is a product of rows and columns and its gradient a sum
over rows. By *key*, row i has one column for each key. Key j of row i uses entry m − 1 − i + j of m + n − 1, so the
same memory read with rows one element closer together is in the other form.

Shape letters: H query heads (or G, R: those of each key head), X table entries; lower case: g, r heads, m rows, n keys
and x = m + n − 1 entries of a tile.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bayesattn.attention.problem import Problem


class Bias:
    """The tables of a problem, farthest distance first: what key j of query i needs is entry M − 1 − i + j.

    Args:
        problem: whose bias it is.
        heads: the sizes of the dimensions of heads, `(H,)` or `(G, R)`.
    """

    def __init__(self, problem: Problem, heads: tuple[int, ...]) -> None:
        self.num_queries = problem.num_queries
        self.own = problem.num_queries - 1 + problem.offset  # entry of distance 0
        self.prior, self.mask = (x.flip(-1).unflatten(0, heads) for x in problem.prior_and_mask())

    def entries(self, rows: slice, keys: slice) -> slice:
        """Those that the queries `rows` and these keys use."""
        last = self.num_queries - rows.start
        return slice(self.num_queries - rows.stop + keys.start, last + keys.stop - 1)

    def windows(self, heads: tuple[slice, ...], rows: slice, keys: slice) -> Tensor:
        """Prior and mask of the queries `rows`, the last one first, by key, `[*heads, m, n]`; a view of the table."""
        entries = (*heads, self.entries(rows, keys))
        return (self.prior[entries] + self.mask[entries]).unfold(-1, keys.stop - keys.start, 1)

    def write(self, heads: tuple[slice, ...], entries: slice, scale: Tensor | None, out: Tensor) -> None:
        """Write prior and mask by entry, `[..., *heads, m, x]`; a scale `[..., *heads, m, 1]` multiplies the prior."""
        prior, mask = (table[(*heads, entries)].unsqueeze(-2) for table in (self.prior, self.mask))
        if scale is None:
            out.copy_(prior)
        else:
            torch.mul(prior, scale, out=out)  # masked after scaling
        for hidden in self._hidden(entries):
            out[..., hidden] += mask[..., hidden]

    def reaches(self, distance: int | None) -> bool:
        """Whether prior or mask is anything but 0 from this distance on; True for None."""
        if distance is None:
            return True
        entries = slice(max(0, self.own - distance + 1))
        return bool(self.prior[..., entries].any() or self.mask[..., entries].any())

    def _hidden(self, entries: slice) -> list[slice]:
        """Which of these some head may hide. Most often it is the future: the last ones."""
        size = entries.stop - entries.start
        first = min(size, max(0, self._visible.start - entries.start))
        last = min(size, max(first, self._visible.stop - entries.start))
        return [part for part in (slice(0, first), slice(last, size)) if part.start < part.stop]

    @cached_property
    def _visible(self) -> slice:
        """A range of entries that no head hides, about the distance 0 if that is visible."""
        if not self.mask.is_cpu:
            return slice(0, 0)  # the host would have to wait for the values
        hidden = self.mask.flatten(0, -2).any(0).nonzero().flatten()
        before, after = hidden[hidden <= self.own], hidden[hidden > self.own]
        first = int(before[-1]) + 1 if len(before) else 0
        return slice(first, int(after[0]) if len(after) else self.mask.shape[-1])


def by_key(x: Tensor, num_keys: int) -> Tensor:
    """What stands by entry, `[..., m, x]` and contiguous, by key, `[..., m, n]`; a view."""
    *sizes, m, _ = x.shape
    *strides, apart, _ = x.stride()
    return x.as_strided((*sizes, m, num_keys), (*strides, apart - 1, 1), x.storage_offset() + m - 1)


def by_entry(x: Tensor, room: Tensor) -> Tensor:
    """What stands by key, `[..., m, n]`, by entry, `[..., m, x]`, with zeros where there is no key; written to room."""
    m, n = x.shape[-2:]
    if m == 1:
        return x
    flat = room.flatten(-2)
    flat[..., : m - 1] = 0.0
    flat[..., -1] = 0.0
    body = flat[..., m - 1 : -1].unflatten(-1, (m, n + m - 2))
    body[..., :n] = x
    body[..., n:] = 0.0
    return room
