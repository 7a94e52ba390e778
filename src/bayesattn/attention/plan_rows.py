"""Certified pruning under a conditioned prior: which distances can matter to a block of queries.

For query i and a bin of neighbouring distances the family bounds its rows from above, and the static factor is bounded
as well. With u_i, the bound on content of bounds.py, and l_i, the log-sum-exp of some keys that are scored exactly, the
posterior mass of the bin is at most

    distances in the bin · exp(r_i · (bound of rows + bound of the static log-prior) + u_i − l_i).

A block of queries keeps the shortest range of bins outside of which no query may have more mass than is allowed.

Shape letters: B batch, H heads, M queries of a block, D head size, I blocks, X table entries, Z bins, S scored keys.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.bounds import content_bound
from bayesattn.attention.problem import Problem
from bayesattn.priors.conditioned import ConditionedPrior, evaluate_rows, find_family

# Keys scored exactly for each query: the nearest.
NEAREST = 8

_warned: set[str] = set()


def could_cut(problem: Problem, table: Tensor) -> bool:
    """Whether looking for keys to leave out can pay.

    Without a tolerance it is only worth it for keys that the static factor hides: those whose weight vanishes under the
    rows are few. Under a flat static table no distance beyond an extent is unlikely.
    """
    if problem.tolerance == 0:
        return bool(table.isneginf().any())
    extent = find_family(problem.family).extent(problem.shared)
    return extent is None or bool(table.amin() < table.amax())


def kept_entries(problem: Problem, first: int, log_allowed: float, rows: int, bin_size: int) -> tuple[Tensor, Tensor]:
    """First and last (excluded) entry of the table that each head and block of `rows` queries keeps, `[H, I]` each.

    Args:
        problem: with a conditioned prior.
        first: entries before this one are in the future of every query.
        log_allowed: log of the posterior mass that may be left out on either side.
        rows: queries of a block.
        bin_size: entries of a bin.
    """
    bounds = _Bounds(problem, first, bin_size)
    kept = [bounds.kept(slice(i, min(i + rows, problem.num_queries)), log_allowed)
            for i in range(0, problem.num_queries, rows)]  # fmt: skip
    start, stop = (torch.stack(part, -1) for part in zip(*kept, strict=True))
    return first + start * bin_size, first + stop * bin_size


class _Bounds:
    def __init__(self, problem: Problem, first: int, bin_size: int) -> None:
        p = problem
        assert p.parameters is not None
        self.problem, self.bin_size = p, bin_size
        self.family = find_family(p.family)
        self.shared = tuple(x.double() for x in p.shared)
        table = p.log_prior[:, first:].double()
        self.table = pad(table, (0, -table.shape[1] % bin_size), value=-torch.inf)
        self.bins = self.table.unflatten(-1, (-1, bin_size)).amax(-1)  # [H, Z]
        entries = torch.arange(self.table.shape[1], device=table.device)
        self.distances = (first + entries + p.offset - p.num_keys + 1).double().unflatten(0, (-1, bin_size))  # [Z, bin]
        self.lowest = first + p.offset - p.num_keys + 1  # distance of the first entry
        self.masked = p.fully_masked()
        seen = p.visible_keys(p.num_queries)
        norms = p.k[:, :, :seen].to(p.dtype).norm(dim=-1).double()
        largest = norms.amax(-1, keepdim=True) if seen else norms.new_zeros(*norms.shape[:2], 1)
        self.key_norm = largest.repeat_interleave(p.group, 1)  # [B, H, 1]
        self.content = self._nearest_content()

    def kept(self, rows: slice, log_allowed: float) -> tuple[Tensor, Tensor]:
        """First and last (excluded) bin that a block needs, `[H]` each."""
        p = self.problem
        assert p.parameters is not None
        parameters = p.parameters[:, :, rows].double()
        scale = None if p.query_scale is None else p.query_scale[..., rows].double().unsqueeze(-1)  # [B, H, M, 1]
        query_norm = p.q[:, :, rows].to(p.dtype).norm(dim=-1).double()
        largest = content_bound(query_norm, self.key_norm, p.softmax_scale, None if scale is None else scale[..., 0])
        excess = largest - self._scored(parameters, scale, rows)
        if self.masked is not None:
            excess = excess.masked_fill(self.masked[:, :, rows], -torch.inf)

        near, far = self._occurring(rows)
        rows_at_most = self.family.highest(parameters, self.shared, self.distances[near:far])
        if rows_at_most is None:
            _warn_once(self.family, p.tolerance)
            rows_at_most = parameters.new_full((1, 1, 1, 1), torch.inf)
        bins = self.bins[:, near:far]
        hidden = bins.isneginf()
        bound = rows_at_most + bins.masked_fill(hidden, 0.0).unsqueeze(1)  # [B, H, M, Z]
        if scale is not None and p.scale_prior:
            bound = torch.where(scale > 0, scale * bound, torch.inf)
        bound = (bound + excess.unsqueeze(-1)).amax((0, 2))  # [H, Z]
        bound = torch.where(bound.isnan(), torch.inf, bound)  # a NaN bounds nothing
        mass = bound.exp() * self.bin_size + 1e-300  # what underflowed
        mass = mass.masked_fill(hidden, 0.0)
        first = (mass.cumsum(-1).log() <= log_allowed).sum(-1)
        last = mass.shape[-1] - (mass.flip(-1).cumsum(-1).log() <= log_allowed).sum(-1)
        return near + torch.minimum(first, last), near + last

    def _occurring(self, rows: slice) -> tuple[int, int]:
        """First and last (excluded) bin with a distance from a query of the block to a key."""
        p = self.problem
        lowest = max(p.offset + rows.start - p.num_keys + 1, self.lowest)
        highest = max(p.offset + rows.stop - 1, lowest)
        return (lowest - self.lowest) // self.bin_size, (highest - self.lowest) // self.bin_size + 1

    def _nearest_content(self) -> Tensor:
        """softmax_scale · q·k of each query with the nearest keys, `[B, H, M, S]`; −inf where there is no such key."""
        p = self.problem
        content = p.q.new_full((*p.q.shape[:3], NEAREST), -torch.inf, dtype=p.dtype)
        by_group, q = content.unflatten(1, (-1, p.group)), p.q.unflatten(1, (-1, p.group)).to(p.dtype)
        k = p.k.unsqueeze(2).to(p.dtype)
        for distance in range(NEAREST):
            first = max(0, distance - p.offset)
            last = min(p.num_queries, p.num_keys + distance - p.offset)
            if first < last:
                keys = slice(p.offset + first - distance, p.offset + last - distance)
                products = torch.linalg.vecdot(q[..., first:last, :], k[..., keys, :])
                by_group[..., first:last, distance] = products * p.softmax_scale
        return content

    def _scored(self, parameters: Tensor, scale: Tensor | None, rows: slice) -> Tensor:
        """l, the log-sum-exp of the logits of the nearest keys, `[B, H, M]`; −inf where none of them is visible."""
        p, distance = self.problem, torch.arange(NEAREST, device=self.table.device)
        content = self.content[:, :, rows].double()
        hidden = content.isneginf()
        key = p.offset + torch.arange(rows.start, rows.stop, device=distance.device)[:, None] - distance  # [M, S]
        if p.documents is not None:
            start, stop = p.documents[:, rows, None].unbind(-1)
            hidden = hidden | ((key < start) | (key >= stop)).unsqueeze(1)
        entry = (distance - self.lowest).clamp(0, self.table.shape[1] - 1)
        static = self.table[:, None, entry]  # [H, 1, S]
        hidden = hidden | static.isneginf()
        content = content.masked_fill(hidden, 0.0)
        by_query = distance.double().expand(len(key), -1) if self.family.elementwise else distance.double()
        prior = static.masked_fill(static.isneginf(), 0.0) + evaluate_rows(
            self.family, parameters, self.shared, by_query
        )
        if scale is None:
            logits = content + prior
        else:
            logits = scale * (content + prior) if p.scale_prior else scale * content + prior
        return logits.masked_fill(hidden, -torch.inf).logsumexp(-1)


def _warn_once(family: type[ConditionedPrior], tolerance: float) -> None:
    if tolerance > 0 and family.family not in _warned:
        _warned.add(family.family)
        warnings.warn(
            f"{family.__name__} has no bound of its rows, so only keys that a static factor hides are left out, "
            "whatever the tolerance",
            stacklevel=2,
        )
