"""What a conditioned prior adds to the logits of tiles, and the gradients of what it is made from.

The rows of a tile are evaluated where they are needed and forgotten: nothing of the size queries × keys is kept. The
backward pass differentiates them by `torch.func.vjp`, which works inside of an operator, where autograd does not.

Shape letters: B batch, H query heads, P parameters of a query; lower case: b, h, m, n those of a tile and
x = m + n − 1 of its distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.kernels.bias import by_entry, by_key
from bayesattn.attention.kernels.buffers import Buffers
from bayesattn.attention.problem import Problem
from bayesattn.priors.conditioned import evaluate_rows, find_family

# Numbers of an elementwise family's rows that are evaluated at once: few enough for the processor's cache.
AT_ONCE = 2**16


class Part(NamedTuple):
    """Some queries of some heads, and the keys they may see."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice


class Rows:
    """The rows of a problem's conditioned prior, a part at a time."""

    def __init__(self, problem: Problem) -> None:
        assert problem.parameters is not None
        self.offset, self.num_heads = problem.offset, problem.q.shape[1]
        self.family = find_family(problem.family)
        self.parameters = problem.parameters.to(problem.dtype)
        self.shared = tuple(x.to(problem.dtype) for x in problem.shared)
        self.buffer = Buffers(problem.dtype, problem.q.device).get
        self.extent = self.family.extent(self.shared)
        self.lowest = min(0, self.offset)
        positions = torch.arange(self.lowest, max(problem.num_keys, self.offset + problem.num_queries))
        self.positions = positions.to(self.parameters)

    @property
    def are_of_all_heads(self) -> bool:
        """Whether rows of all heads take little longer than those of one."""
        return self.num_heads > 1 and self.parameters.shape[1] == 1

    def add_to(self, logits_bhmn: Tensor, part: Part, scale_bhm1: Tensor | None) -> None:
        """Add a part's rows, times the scale if there is one, to its logits."""
        shared = self._simplify(part, *self._shared(part))
        for piece, into in self._pieces(part):
            values = self._by_key(piece, self._evaluate(piece)(self._parameters(piece), *shared))
            target = logits_bhmn[..., into.rows, into.keys]
            if scale_bhm1 is None:
                target += values
            else:
                target.addcmul_(values, scale_bhm1[..., into.rows, :])

    def gradients(self, batch: slice = slice(None), heads: slice | None = None) -> RowGradients:
        """Gradients of some sequences and heads, or of all, zero at first."""
        return RowGradients(self, batch, slice(0, self.num_heads) if heads is None else heads)

    def of_parameters(self, x: Tensor, batch: slice, heads: slice) -> Tensor:
        """A view of those of some sequences and heads, `[b, h, M, P]`."""
        return x[batch if len(x) > 1 else slice(None), heads if x.shape[1] > 1 else slice(None)]

    def of_shared(self, x: Tensor, heads: slice) -> Tensor:
        """A view of what belongs to some heads."""
        return x[heads] if len(x) == self.num_heads else x

    def _parameters(self, part: Part) -> Tensor:
        return self.of_parameters(self.parameters, part.batch, part.heads)[:, :, part.rows]

    def _shared(self, part: Part) -> tuple[Tensor, ...]:
        return tuple(self.of_shared(x, part.heads) for x in self.shared)

    def _simplify(self, part: Part, *shared: Tensor) -> tuple[Tensor, ...]:
        """Shared tensors that are enough for a part's distances."""
        if not self.parameters.is_cpu:
            return shared  # the host would have to wait for the values
        nearest = self.offset + part.rows.start - part.keys.stop + 1
        farthest = self.offset + part.rows.stop - 1 - part.keys.start
        return self.family.simplify(self._parameters(part), shared, nearest, farthest)

    def _simplify_for_gradients(self, part: Part) -> tuple[Any, Callable[..., Any]]:
        """The same, and the function that takes their gradients to those of the part's shared tensors."""
        if not self.shared:
            return (), lambda gradients: gradients
        simplified, pull_back = torch.func.vjp(partial(self._simplify, part), *self._shared(part))  # type: ignore[misc]
        return simplified, pull_back

    def _evaluate(self, part: Part) -> Callable[..., Tensor]:
        """Rows from parameters and shared tensors: by key for an elementwise family, by entry otherwise."""
        distances = self._distances(part)
        return lambda parameters, *shared: evaluate_rows(self.family, parameters, shared, distances)

    def _distances(self, part: Part) -> Tensor:
        """`[m, n]` by key, or `[x]` by entry, the farthest first."""
        m, n = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
        like = self.parameters
        if not self.family.elementwise:
            farthest = self.offset + part.rows.stop - 1 - part.keys.start
            return torch.arange(farthest, farthest - (m + n - 1), -1, device=like.device).to(like.dtype)
        i = self.positions.narrow(0, self.offset + part.rows.start - self.lowest, m)
        return i[:, None] - self.positions.narrow(0, part.keys.start - self.lowest, n)

    def _by_key(self, part: Part, values: Tensor) -> Tensor:
        if self.family.elementwise:
            return values
        return by_key(values.contiguous(), part.keys.stop - part.keys.start)

    def _pieces(self, part: Part) -> Iterator[tuple[Part, Part]]:
        """What to evaluate at once, and where it is within the part; what is beyond the extent is left out."""
        b, h, rows, keys = part
        if self.extent is not None:
            nearest, farthest = self.offset + rows.stop, self.offset + rows.start - self.extent + 1
            keys = slice(max(keys.start, farthest), min(keys.stop, nearest))
            if keys.start >= keys.stop:
                return
        sizes = [each.stop - each.start for each in (b, h, rows, keys)]
        step = max(1, AT_ONCE // (sizes[0] * sizes[1] * sizes[3])) if self.family.elementwise else sizes[2]
        within = slice(keys.start - part.keys.start, keys.stop - part.keys.start)
        for first in range(0, sizes[2], step):
            some = slice(first, min(first + step, sizes[2]))
            absolute = slice(rows.start + some.start, rows.start + some.stop)
            yield Part(b, h, absolute, keys), Part(b, h, some, within)


class RowGradients:
    """The gradients of the parameters and of the shared tensors, summed over the parts of some sequences and heads."""

    def __init__(self, rows: Rows, batch: slice, heads: slice) -> None:
        self.rows, self.batch, self.heads = rows, batch, heads
        self.parameters = torch.zeros_like(rows.of_parameters(rows.parameters, batch, heads))
        self.shared = [torch.zeros_like(rows.of_shared(x, heads)) for x in rows.shared]

    def add(self, dlogits_bhmn: Tensor, part: Part, scale_bhm1: Tensor | None) -> Tensor | None:
        """Add those of a part, which has all sequences and some of the heads; returns the scale's, `[b, h, m, 1]`."""
        rows, chosen = self.rows, self._heads_within(part.heads)
        dscale = None if scale_bhm1 is None else dlogits_bhmn.new_zeros(*dlogits_bhmn.shape[:3], 1)
        simplified, pull_back_shared = rows._simplify_for_gradients(part)
        dshared = [torch.zeros_like(x) for x in simplified]
        for piece, within in rows._pieces(part):
            values, pull_back = torch.func.vjp(  # type: ignore[misc]
                rows._evaluate(piece), rows._parameters(piece), *simplified
            )
            grad = dlogits_bhmn[..., within.rows, within.keys]
            if scale_bhm1 is not None and dscale is not None:
                dscale[..., within.rows, :] = (grad * rows._by_key(piece, values)).sum(-1, keepdim=True)
                grad = grad * scale_bhm1[..., within.rows, :]
            grad = grad.sum_to_size(len(values), *grad.shape[1:])  # of sequences that share a row, their sum
            if not rows.family.elementwise:
                grad = by_entry(grad, rows.buffer("rows by entry", (*grad.shape[:3], values.shape[-1])))
            parameters, *shared = pull_back(grad.sum_to_size(values.shape))
            rows.of_parameters(self.parameters, slice(None), chosen)[:, :, piece.rows] += parameters
            for total, gradient in zip(dshared, shared, strict=True):
                total.add_(gradient)
        for total, gradient in zip(self.shared, pull_back_shared(tuple(dshared)), strict=True):
            (total[chosen] if len(total) == self.heads.stop - self.heads.start else total).add_(gradient)
        return dscale

    def add_to(self, whole: RowGradients) -> None:
        """Add to the gradients of all sequences and heads."""
        self.rows.of_parameters(whole.parameters, self.batch, self.heads).add_(self.parameters)
        for total, part in zip(whole.shared, self.shared, strict=True):
            self.rows.of_shared(total, self.heads).add_(part)

    def _heads_within(self, heads: slice) -> slice:
        return slice(heads.start - self.heads.start, heads.stop - self.heads.start)
