"""Exact attention in linear memory on any device, forward and backward, with the gradient to the prior's table.

It computes one tile at a time: some query rows of some heads against all the keys they may see. The backward pass
computes each posterior again, except those of problems so small that they are kept.

Shape letters: B batch, G key/value heads, R query heads of each, M queries, N keys, D head size, E value size, X table
entries; lower case for the part of each that is in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.kernels.bias import Bias, by_entry, by_key
from bayesattn.attention.kernels.buffers import Buffers
from bayesattn.attention.kernels.rows import Part, RowGradients, Rows
from bayesattn.attention.kernels.threads import one_thread_each, share
from bayesattn.attention.plan import DEFAULT_LIMITS, Plan, PlanLimits, plan
from bayesattn.attention.problem import MASKED, Problem, Solution


@dataclass(frozen=True)
class TileLimits:
    """How large a tile may be.

    Tiles of `elements` give efficient products where torch shares each operator among its threads. Where one thread
    computes a tile, `elements_alone` are a compromise of its cache and of operators long enough to be worth a call.
    Few rows compute less of the future in vain, many make better use of keys: half of `most_rows` for up to `few_keys`,
    but all rows if these are no more than `most_rows` and make one tile, with the fewest operators.
    """

    elements: int = 2**20
    elements_alone: int = 2**19
    most_rows: int = 128
    least_rows: int = 16
    few_keys: int = 1024


DEFAULT_TILES = TileLimits()
# Logits of the largest problem whose posterior is kept for the backward pass. The bound keeps memory linear in the
# number of tokens.
MOST_KEPT_LOGITS = 2**22


class Tile(NamedTuple):
    """The part of a problem that is computed at once."""

    batch: slice
    kv_heads: slice
    members: slice  # query heads within each key/value head
    rows: slice
    keys: slice


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_prior: Tensor | None
    query_scale: Tensor | None
    parameters: Tensor | None
    shared: tuple[Tensor, ...]  # empty where those of the conditioned prior are not needed


class Needed(NamedTuple):
    """Which gradients are needed besides those of q, k and v."""

    prior: bool  # the table's
    scale: bool
    rows: bool  # those of the parameters and shared tensors of a conditioned prior


ALL_NEEDED = Needed(prior=True, scale=True, rows=True)


def forward(problem: Problem, tiles: TileLimits = DEFAULT_TILES, limits: PlanLimits = DEFAULT_LIMITS) -> Solution:
    """The output, and the log-sum-exp if it is wanted."""
    work = _Workspace(problem)
    shape = problem.q.shape[:3]
    all_tiles = list(_tiles(problem, tiles, limits))
    make = problem.q.new_empty if _is_whole(problem, all_tiles) else problem.q.new_zeros
    out = make((*shape, problem.v.shape[-1]), dtype=problem.dtype)
    lse = problem.q.new_full(shape, -torch.inf, dtype=problem.dtype) if problem.needs_lse else None
    out_BGRME, lse_BGRM1 = work.by_group(out), None if lse is None else work.by_group(lse.unsqueeze(-1))

    kept = None
    if problem.needs_posterior:
        kept = problem.q.new_empty(num_logits(problem), dtype=problem.dtype)

    def solve(tile_and_room: tuple[Tile, Tensor | None]) -> None:
        tile, room = tile_and_room
        logits = work.logits(tile)
        posterior = torch.softmax(logits, -1, out=work.buffer("posterior", logits.shape) if room is None else room)
        work.multiply(posterior, work.keys(work.v, tile), out_BGRME, tile)
        if lse_BGRM1 is not None:
            # The likeliest key tells: its posterior is exp(logit − lse). Which key it is takes longer than two maxima.
            largest, likeliest = (x.amax(-1, keepdim=True) for x in (posterior, logits))
            work.rows(lse_BGRM1, tile).copy_(work.like_rows(likeliest - largest.log(), tile))

    share(solve, _with_posteriors(all_tiles, kept, work), one_thread_each(problem))
    return problem.solution(out, lse)._replace(posterior=kept)


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needed: Needed = ALL_NEEDED,
    tiles: TileLimits = DEFAULT_TILES,
    limits: PlanLimits = DEFAULT_LIMITS,
    kept: Tensor | None = None,
) -> Gradients:
    """Gradients of all inputs; those of the priors and the query scale only where they are needed.

    `grad_out` is `[B, H, M, E]`; `grad_lse` is `[B, H, M]`, or None if nothing depends on the log-sum-exp; `kept` is
    the posterior of `forward` with the same limits, or None to compute it again.
    """
    work = _Workspace(problem)
    masked = problem.fully_masked()
    grads = [grad_out.to(problem.dtype), None if grad_lse is None else grad_lse.to(problem.dtype).unsqueeze(-1)]
    if masked is not None:
        grads = [None if x is None else x.masked_fill(masked.unsqueeze(-1), 0.0) for x in grads]
    grad_BGRME, grad_lse_BGRM1 = (None if x is None else work.by_group(x) for x in grads)
    assert grad_BGRME is not None

    all_tiles = list(_tiles(problem, tiles, limits))
    is_one = _is_whole(problem, all_tiles)
    make = torch.empty_like if is_one else torch.zeros_like
    dq = make(work.q, memory_format=torch.contiguous_format)
    dk, dv = make(work.k), make(work.v)
    needed = needed._replace(
        scale=needed.scale and work.scale is not None, rows=needed.rows and problem.parameters is not None
    )

    def differentiate(tiles_of_keys: list[tuple[Tile, Tensor | None]]) -> _PriorGradients:
        """Add the parts of tiles that share keys. Nothing else writes to these keys' gradients."""
        of_prior = _PriorGradients(work, tiles_of_keys[0][0], needed)
        for tile, posterior in tiles_of_keys:
            if posterior is None:
                logits = work.logits(tile)
                posterior = torch.softmax(logits, -1, out=logits)
            grad = work.flat_rows(grad_BGRME, tile)
            work.add_product(posterior.mT, grad, work.keys(dv, tile), is_one)

            dlogits = torch.bmm(grad, work.keys(work.v, tile).mT, out=work.buffer("dlogits", posterior.shape))
            _softmax_backward(dlogits, posterior)
            if grad_lse_BGRM1 is not None:
                dlogits.addcmul_(posterior, work.flat_rows(grad_lse_BGRM1, tile))

            work.add_product(dlogits.mT, work.flat_rows(work.scaled_q, tile), work.keys(dk, tile), is_one)
            work.multiply(dlogits, work.keys(work.k, tile), dq, tile)
            of_prior.add(tile, dlogits.view(work.shape(tile)))
        return of_prior

    with_posteriors = _with_posteriors(all_tiles, kept, work)
    by_keys = [list(some) for _, some in groupby(with_posteriors, lambda pair: pair[0][:2])]
    parts = share(differentiate, by_keys, one_thread_each(problem))

    dprior = torch.zeros_like(work.bias.prior) if needed.prior else None
    dscale = torch.zeros_like(work.scale) if needed.scale and work.scale is not None else None
    of_rows = work.rows_of_prior.gradients() if needed.rows and work.rows_of_prior is not None else None
    for part in parts:
        part.add_to(dprior, dscale, of_rows)
    if dscale is not None:
        # Σ_j dlogits · q·k_j is q · Σ_j dlogits k_j: the content's part needs no pass over the tile.
        content = torch.mul(dq, work.q, out=work.buffer("scaled_q", dq.shape)).sum(-1, keepdim=True)
        dscale.add_(content.sum_to_size(dscale.shape), alpha=problem.softmax_scale)
    dq *= work.factor
    return Gradients(
        dq.flatten(1, 2).to(problem.q.dtype),
        dk.to(problem.k.dtype),
        dv.to(problem.v.dtype),
        None if dprior is None else dprior.flip(-1).flatten(0, 1).to(problem.log_prior.dtype),
        None if dscale is None else dscale.flatten(1, 2).squeeze(-1).to(problem.query_scale.dtype),  # type: ignore[union-attr]
        None if of_rows is None else of_rows.parameters.to(problem.parameters.dtype),  # type: ignore[union-attr]
        () if of_rows is None else tuple(x.to(y.dtype) for x, y in zip(of_rows.shared, problem.shared, strict=True)),
    )


class _PriorGradients:
    """The gradients of the priors, and of the query scale where it multiplies them, by tiles that share keys."""

    def __init__(self, work: _Workspace, first: Tile, needed: Needed) -> None:
        self.work, self.batch, self.kv_heads = work, first.batch, first.kv_heads
        self.prior = torch.zeros_like(work.bias.prior[first.kv_heads]) if needed.prior else None  # [g, R, X]
        self.scale = None  # [1 or b, g, R, M, 1]
        if needed.scale and work.prior_scale is not None:
            self.scale = torch.zeros_like(work.prior_scale[self.sequences(work.prior_scale), first.kv_heads])
        self.rows = None
        if work.rows_of_prior is not None and (needed.rows or self.scale is not None):
            heads = slice(first.kv_heads.start * work.group, first.kv_heads.stop * work.group)
            self.rows = work.rows_of_prior.gradients(first.batch, heads)

    def sequences(self, scale: Tensor) -> slice:
        """Which of the scale's sequences are those of the tiles."""
        return self.batch if len(scale) > 1 else slice(None)

    def add(self, tile: Tile, dlogits: Tensor) -> None:
        """Add a tile's part; its gradients are `[b, g, r, m, n]`."""
        work, entries = self.work, self.work.bias.entries(tile.rows, tile.keys)
        scale = None if work.prior_scale is None else work.rows(work.prior_scale, tile)
        if self.rows is not None:
            of_scale = self.rows.add(
                dlogits.flatten(1, 2), work.part(tile), None if scale is None else scale.flatten(1, 2)
            )
            if self.scale is not None and of_scale is not None:
                total = self.scale[:, :, tile.members, tile.rows]
                total += of_scale.unflatten(1, total.shape[1:3]).sum_to_size(total.shape)
        if self.prior is None and self.scale is None:
            return
        into = None if self.scale is None else self.scale[:, :, tile.members, tile.rows]
        if len(dlogits) > 1 and scale is not None and len(scale) > 1:
            # Each sequence has its own scale: its gradient is summed by key, so that only a sum need be moved.
            product = work.buffer("product of logits", dlogits.shape)
            if into is not None:
                prior = work.table_by_key(work.bias.prior, tile, "by entry")
                into += torch.mul(dlogits, prior, out=product).sum(-1, keepdim=True)
            dlogits, scale, into = torch.mul(dlogits, scale, out=product), None, None
        if len(dlogits) > 1:
            dlogits = dlogits.sum(0, keepdim=True)  # what sequences share is summed over them first
        room = work.buffer("by entry", (*dlogits.shape[:4], entries.stop - entries.start))
        dbias = by_entry(dlogits, room)
        if self.prior is not None:
            of_entries = dbias.sum(-2) if scale is None else (scale.mT @ dbias).squeeze(-2)
            self.prior[:, tile.members, entries] += of_entries.sum(0)
        if into is not None:
            prior = work.bias.prior[tile.kv_heads, tile.members, entries]
            # Many small products of a matrix and a vector take longer.
            into += dbias.mul_(prior.unsqueeze(-2)).sum(-1, keepdim=True)

    def add_to(self, dprior_GRX: Tensor | None, dscale_BGRM1: Tensor | None, of_rows: RowGradients | None) -> None:
        """Add to the gradients of all heads."""
        if dprior_GRX is not None and self.prior is not None:
            dprior_GRX[self.kv_heads] += self.prior
        if dscale_BGRM1 is not None and self.scale is not None:
            dscale_BGRM1[self.sequences(dscale_BGRM1), self.kv_heads] += self.scale
        if of_rows is not None and self.rows is not None:
            self.rows.add_to(of_rows)


class _Workspace:
    """The inputs in working precision, and buffers that all tiles share."""

    def __init__(self, problem: Problem) -> None:
        dtype = problem.dtype
        self.problem = problem
        self.kv_heads, self.group = problem.k.shape[1], problem.group
        self.buffer = Buffers(dtype, problem.q.device).get
        self.q = self.by_group(problem.q.to(dtype))
        self.k, self.v = (x.to(dtype).contiguous() for x in (problem.k, problem.v))
        self.scale = None if problem.query_scale is None else self.by_group(problem.query_scale.to(dtype).unsqueeze(-1))
        self.factor = problem.softmax_scale if self.scale is None else problem.softmax_scale * self.scale
        self.scaled_q = torch.mul(self.q, self.factor, out=self.buffer("scaled_q", self.q.shape))
        self.prior_scale = self.scale if problem.scale_prior else None
        self.bias = Bias(problem, (self.kv_heads, self.group))
        self.rows_of_prior = None if problem.parameters is None else Rows(problem)

    def by_group(self, x: Tensor) -> Tensor:
        """[B, H, ...] as [B, G, R, ...]."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def rows(self, x_BGRMF: Tensor, tile: Tile) -> Tensor:
        """A view of the tile's rows, [b, g, r, m, F]."""
        batch = tile.batch if len(x_BGRMF) > 1 else slice(None)
        return x_BGRMF[batch, tile.kv_heads, tile.members, tile.rows]

    def flat_rows(self, x_BGRMF: Tensor, tile: Tile) -> Tensor:
        """The tile's rows with those that share keys side by side, [b·g, r·m, F]."""
        return self.rows(x_BGRMF, tile).flatten(2, 3).flatten(0, 1)

    def like_rows(self, flat: Tensor, tile: Tile) -> Tensor:
        """[b·g, r·m, F] back to [b, g, r, m, F]."""
        b, g, r, m, _ = self.shape(tile)
        return flat.view(b, g, r, m, flat.shape[-1])

    def keys(self, x_BGNF: Tensor, tile: Tile) -> Tensor:
        """A view of the tile's keys or values, [b·g, n, F]."""
        x = x_BGNF[tile.batch, tile.kv_heads, tile.keys]
        return x.view(-1, *x.shape[2:])

    def multiply(self, matrix: Tensor, keys: Tensor, into_BGRMF: Tensor, tile: Tile) -> None:
        """Write the product `[b·g, r·m, n] @ [b·g, n, F]` to the tile's rows."""
        rows, shape = self.rows(into_BGRMF, tile), (*matrix.shape[:2], keys.shape[2])
        if rows.is_contiguous():
            torch.bmm(matrix, keys, out=rows.view(shape))
        else:
            rows.copy_(self.like_rows(torch.bmm(matrix, keys, out=self.buffer("rows", shape)), tile))

    def table_by_key(self, table: Tensor, tile: Tile, buffer: str) -> Tensor:
        """What a table of the bias has for the tile's rows, [g, r, m, n]; written to a buffer."""
        _, g, r, m, n = self.shape(tile)
        entries = table[tile.kv_heads, tile.members, self.bias.entries(tile.rows, tile.keys)]
        return by_key(self.buffer(buffer, (g, r, m, m + n - 1)).copy_(entries.unsqueeze(-2)), n)

    def hidden_by_documents(self, tile: Tile) -> Tensor:
        """1 or 2 where a key is not in the document of the query, else 0, [b, 1, 1, m, n]."""
        documents = self.problem.documents
        assert documents is not None
        start, stop = documents[tile.batch, tile.rows, None].unbind(-1)
        j = torch.arange(tile.keys.start, tile.keys.stop, device=start.device)
        hidden = torch.lt(j, start, out=self.buffer("hidden", (len(start), start.shape[1], len(j))))
        if not self.problem.causal:  # the end of its document is in the future of every query
            hidden += j >= stop
        return hidden[:, None, None]

    def add_product(self, left: Tensor, right: Tensor, to: Tensor, is_first: bool) -> None:
        """Add a product of matrices, or write it if it is the first."""
        if to.is_contiguous():
            to.baddbmm_(left, right, beta=0 if is_first else 1)
        else:  # torch would multiply one matrix after the other
            to.add_(torch.bmm(left, right, out=self.buffer("product", to.shape)))

    def shape(self, tile: Tile) -> tuple[int, int, int, int, int]:
        b, g, r, m, n = (part.stop - part.start for part in tile)
        return b, g, r, m, n

    def part(self, tile: Tile) -> Part:
        """The tile by query heads. It has all of the query heads of each key head, or is of one key head."""
        first, last = tile.kv_heads.start * self.group, (tile.kv_heads.stop - 1) * self.group
        return Part(tile.batch, slice(first + tile.members.start, last + tile.members.stop), tile.rows, tile.keys)

    def logits(self, tile: Tile) -> Tensor:
        """The tile's logits, [b·g, r·m, n]."""
        b, g, r, m, n = self.shape(tile)
        logits = self.buffer("logits", (b, g, r, m, n))
        scale = None if self.prior_scale is None else self.rows(self.prior_scale, tile)
        if scale is None or len(scale) == 1:
            bias = self.buffer("by entry", (1, g, r, m, m + n - 1))
            self.bias.write((tile.kv_heads, tile.members), self.bias.entries(tile.rows, tile.keys), scale, bias)
            logits.copy_(by_key(bias, n))
        else:
            prior = self.table_by_key(self.bias.prior, tile, "by entry")
            torch.addcmul(self.table_by_key(self.bias.mask, tile, "mask"), prior, scale, out=logits)
        if self.rows_of_prior is not None:
            by_head = None if scale is None else scale.flatten(1, 2)
            self.rows_of_prior.add_to(logits.view(b, g * r, m, n), self.part(tile), by_head)
        if self.problem.documents is not None:
            logits.add_(self.hidden_by_documents(tile), alpha=MASKED)
        flat = logits.view(b * g, r * m, n)
        return flat.baddbmm_(self.flat_rows(self.scaled_q, tile), self.keys(self.k, tile).mT)


def num_logits(problem: Problem) -> int:
    """Of all queries with all keys."""
    return len(problem.q) * problem.q.shape[1] * problem.num_queries * problem.num_keys


def _with_posteriors(tiles: list[Tile], kept: Tensor | None, work: _Workspace) -> list[tuple[Tile, Tensor | None]]:
    """Each tile with its part of the memory for posteriors, `[b·g, r·m, n]`, if there is one."""
    if kept is None:
        return [(tile, None) for tile in tiles]
    shapes = [work.shape(tile) for tile in tiles]
    parts = kept[: sum(map(math.prod, shapes))].split([math.prod(shape) for shape in shapes])
    return [
        (tile, part.view(b * g, r * m, n)) for tile, part, (b, g, r, m, n) in zip(tiles, parts, shapes, strict=True)
    ]


def _tiles(problem: Problem, tiles: TileLimits = DEFAULT_TILES, limits: PlanLimits = DEFAULT_LIMITS) -> Iterator[Tile]:
    """Cut the problem into tiles of bounded size: fewer rows first, then fewer sequences, then fewer heads.

    Tiles that share keys follow each other, last rows first: a causal tile is then never larger than the one before,
    and buffers are allocated once.
    """
    batch, heads, queries, _ = problem.q.shape
    kv_heads, keys = problem.k.shape[1:3]
    if 0 in (batch, queries, keys):
        return
    if (made := plan(problem, limits)) is not None:
        yield from _planned_tiles(problem, made, tiles)
        return
    elements = tiles.elements_alone if one_thread_each(problem) else tiles.elements
    is_cut = tiles.most_rows < queries or batch * heads * queries * keys > elements
    halved = is_cut and keys <= tiles.few_keys
    most_rows = max(1, tiles.most_rows // 2) if halved else tiles.most_rows
    rows = min(queries, most_rows, max(tiles.least_rows, tiles.elements // keys))
    members = max(1, min(problem.group, elements // (rows * keys)))
    kv_step = max(1, min(kv_heads, elements // (rows * keys * members))) if members == problem.group else 1
    b_step = max(1, elements // (rows * keys * heads)) if kv_step == kv_heads and members == problem.group else 1
    for b in _slices(batch, b_step):
        blocks = _row_blocks(problem, b, rows)
        for g in _slices(kv_heads, kv_step):
            for r in _slices(problem.group, members):
                for row, key in blocks:
                    yield Tile(b, g, r, row, key)


def _is_whole(problem: Problem, tiles: list[Tile]) -> bool:
    """Whether there is one tile, of all rows and all keys."""
    sizes = (len(problem.q), problem.k.shape[1], problem.group, problem.num_queries, problem.num_keys)
    return tiles == [Tile(*(slice(0, size) for size in sizes))]


def _planned_tiles(problem: Problem, made: Plan, tiles: TileLimits) -> Iterator[Tile]:
    """Tiles of one sequence and one head each, since each has its own range of keys."""
    starts, stops = made.start.tolist(), made.stop.tolist()
    for b in _slices(len(problem.q), 1):
        blocks = _row_blocks(problem, b, made.rows)
        for h in range(len(starts)):
            g, r = divmod(h, problem.group)
            for row, key in blocks:
                block = row.start // made.rows
                keys = slice(max(key.start, starts[h][block]), min(key.stop, stops[h][block]))
                if keys.start >= keys.stop:
                    continue
                step = max(tiles.least_rows, tiles.elements // (keys.stop - keys.start))
                for part in _slices(row.stop - row.start, step):
                    rows = slice(row.start + part.start, row.start + part.stop)
                    yield Tile(b, slice(g, g + 1), slice(r, r + 1), rows, keys)


def _row_blocks(problem: Problem, batch: slice, rows: int) -> list[tuple[slice, slice]]:
    """Blocks of rows, last first, each with the range of keys its rows may see; blocks that see none are left out."""
    blocks = _slices(problem.num_queries, rows)[::-1]
    ranges = [(0, problem.visible_keys(block.stop)) for block in blocks]
    if problem.documents is not None:
        start, stop = problem.documents[batch].unbind(-1)
        starts = torch.stack([start[:, block].amin() for block in blocks]).tolist()
        stops = torch.stack([stop[:, block].amax() for block in blocks]).tolist()
        ranges = [(max(lo, a), min(hi, b)) for (lo, hi), a, b in zip(ranges, starts, stops, strict=True)]
    return [(block, slice(lo, hi)) for block, (lo, hi) in zip(blocks, ranges, strict=True) if lo < hi]


def _slices(length: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def _softmax_backward(grad: Tensor, posterior: Tensor) -> None:
    """Make posterior · (grad − Σ posterior · grad) of the gradient, fused.

    It is exactly zero where one key has all the mass. There the prior may be so steep in its parameters that a rounding
    error would become a visible gradient.
    """
    torch.ops.aten._softmax_backward_data.out(grad, posterior, -1, grad.dtype, grad_input=grad)
