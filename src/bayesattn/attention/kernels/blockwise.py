"""Exact attention in linear memory on any device, forward and backward, with the gradient to the prior's table.

It computes one tile at a time: some query rows of some heads against all the keys they may see. Keys are in reverse
order: the log-prior of row i and reversed key j' is then entry i + j' of the table. A window sliding over the table, a
strided view without memory of its own, is the bias of the whole tile. The backward pass computes each posterior again.

Shape letters: B batch, G key/value heads, R query heads of each, M queries, N keys, D head size, E value size, X table
entries; lower case for the part of each that is in a tile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.plan import DEFAULT_LIMITS, Plan, PlanLimits, plan
from bayesattn.attention.problem import MASKED, Problem, Solution


@dataclass(frozen=True)
class TileLimits:
    """How large a tile may be. `elements` is enough for efficient matrix products and fits the last level of cache."""

    elements: int = 2**20
    most_rows: int = 128
    least_rows: int = 16


DEFAULT_TILES = TileLimits()


class Tile(NamedTuple):
    """The part of a problem that is computed at once; `keys` counts in the caller's order."""

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


def forward(problem: Problem, tiles: TileLimits = DEFAULT_TILES, limits: PlanLimits = DEFAULT_LIMITS) -> Solution:
    """The output, and the log-sum-exp if it is wanted."""
    work = _Workspace(problem)
    shape = problem.q.shape[:3]
    out = problem.q.new_zeros((*shape, problem.v.shape[-1]), dtype=problem.dtype)
    lse = problem.q.new_full(shape, -torch.inf, dtype=problem.dtype) if problem.needs_lse else None
    out_BGRME = work.by_group(out)
    for tile in _tiles(problem, tiles, limits):
        posterior = work.posterior(tile)
        work.rows(out_BGRME, tile).copy_(work.like_rows(posterior @ work.keys(work.v, tile), tile))
        if lse is not None:
            # The likeliest key tells: its posterior is exp(logit − lse).
            largest, key = posterior.max(-1, keepdim=True)
            lse_of_rows = work.buffer("logits", posterior.shape).gather(-1, key) - largest.log()
            work.rows(work.by_group(lse.unsqueeze(-1)), tile).copy_(work.like_rows(lse_of_rows, tile))
    return problem.solution(out, lse)


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs_prior: bool,
    needs_scale: bool,
    tiles: TileLimits = DEFAULT_TILES,
    limits: PlanLimits = DEFAULT_LIMITS,
) -> Gradients:
    """Gradients of all five inputs; those of the prior and the query scale only when needed.

    `grad_out` is `[B, H, M, E]`; `grad_lse` is `[B, H, M]`, or None if nothing depends on the log-sum-exp.
    """
    work = _Workspace(problem)
    masked = problem.fully_masked()
    grads = [grad_out.to(problem.dtype), None if grad_lse is None else grad_lse.to(problem.dtype).unsqueeze(-1)]
    if masked is not None:
        grads = [None if x is None else x.masked_fill(masked.unsqueeze(-1), 0.0) for x in grads]
    grad_BGRME, grad_lse_BGRM1 = (None if x is None else work.by_group(x) for x in grads)
    assert grad_BGRME is not None

    dq = torch.zeros_like(work.q, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(work.k), torch.zeros_like(work.v)
    dprior = torch.zeros_like(work.prior) if needs_prior else None
    dscale = torch.zeros_like(work.scale) if needs_scale and work.scale is not None else None

    for tile in _tiles(problem, tiles, limits):
        posterior = work.posterior(tile)
        grad, keys = work.flat_rows(grad_BGRME, tile), work.keys(work.k, tile)
        work.keys(dv, tile).baddbmm_(posterior.mT, grad)

        dposterior = torch.bmm(grad, work.keys(work.v, tile).mT, out=work.buffer("dposterior", posterior.shape))
        dlogits = _softmax_backward(dposterior, posterior, out=work.buffer("logits", posterior.shape))
        if grad_lse_BGRM1 is not None:
            dlogits.addcmul_(posterior, work.flat_rows(grad_lse_BGRM1, tile))

        work.keys(dk, tile).baddbmm_(dlogits.mT, work.flat_rows(work.scaled_q, tile))
        work.rows(dq, tile).copy_(work.like_rows(dlogits @ keys, tile))
        if dprior is not None or (dscale is not None and problem.scale_prior):
            _add_prior_gradients(work, tile, dlogits, dprior, dscale if problem.scale_prior else None)

    if dscale is not None:
        # Σ_j dlogits · q·k_j is q · Σ_j dlogits k_j: the content's part needs no pass over the tile.
        content = (dq * work.q).sum(-1, keepdim=True).sum_to_size(dscale.shape)
        dscale.add_(content, alpha=problem.softmax_scale)
    dq *= problem.softmax_scale if work.scale is None else problem.softmax_scale * work.scale
    return Gradients(
        dq.flatten(1, 2).to(problem.q.dtype),
        dk.flip(2).to(problem.k.dtype),
        dv.flip(2).to(problem.v.dtype),
        None if dprior is None else dprior.flatten(0, 1).to(problem.log_prior.dtype),
        None if dscale is None else dscale.flatten(1, 2).squeeze(-1).to(problem.query_scale.dtype),  # type: ignore[union-attr]
    )


def _add_prior_gradients(
    work: _Workspace, tile: Tile, dlogits: Tensor, dprior_GRX: Tensor | None, dscale_BGRM1: Tensor | None
) -> None:
    """Add the tile's part of the gradients of the prior, and of the query scale where it multiplies the prior."""
    dlogits = dlogits.view(work.shape(tile))
    weights = work.row_weights(tile)
    if len(dlogits) > 1:  # what sequences share is summed over them first, so that the rest is a tile of one
        if len(weights) > 1:
            if dscale_BGRM1 is not None:
                products = torch.mul(dlogits, work.prior_view(tile), out=work.buffer("posterior", dlogits.shape))
                work.rows(dscale_BGRM1, tile).add_(products.sum(-1, keepdim=True))
                dscale_BGRM1 = None
            dlogits, weights = dlogits.mul_(weights), torch.ones_like(weights[:1])
        dlogits = dlogits.sum(0, keepdim=True)
    sheared = work.sheared(dlogits)
    if dprior_GRX is not None:
        work.entries(dprior_GRX, tile).add_((weights.mT @ sheared).squeeze(-2).squeeze(0))
    if dscale_BGRM1 is not None:
        work.rows(dscale_BGRM1, tile).add_(sheared @ work.entries(work.prior, tile).unsqueeze(-1))


class _Kept(threading.local):
    """Buffers that later calls of the same thread use again."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}


_kept = _Kept()
# Elements of the largest buffer that is kept.
MOST_KEPT = 2**20


class _Workspace:
    """The inputs in working precision and in the order that tiles need, and buffers that all tiles share.

    New memory for every tile would cost more in page faults than the arithmetic of the tile.
    """

    def __init__(self, problem: Problem) -> None:
        dtype = problem.dtype
        self.problem = problem
        self.kv_heads, self.group = problem.k.shape[1], problem.group
        self.q = self.by_group(problem.q.to(dtype))
        self.k = problem.k.to(dtype).flip(2).contiguous()
        self.v = problem.v.to(dtype).flip(2).contiguous()
        self.scale = None if problem.query_scale is None else self.by_group(problem.query_scale.to(dtype).unsqueeze(-1))
        self.scaled_q = self.q * problem.softmax_scale
        if self.scale is not None:
            self.scaled_q = self.scaled_q * self.scale

        self.prior_scale = self.scale if problem.scale_prior else None
        # A prior that is scaled is masked after scaling; one that is not can contain the mask.
        self.prior, self.mask = (x.unflatten(0, (self.kv_heads, self.group)) for x in problem.prior_and_mask())
        self.masked_prior = self.prior + self.mask
        self.buffers: dict[str, Tensor] = {}
        self.kept = _kept.buffers.setdefault((dtype, problem.q.device), {})

    def by_group(self, x: Tensor) -> Tensor:
        """[B, H, ...] as [B, G, R, ...]."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def buffer(self, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
        size = torch.Size(shape).numel()
        buffers = self.kept if size <= MOST_KEPT else self.buffers
        if name not in buffers or buffers[name].numel() < size:
            with torch.inference_mode(False):  # a kept one is written to in other modes too
                buffers[name] = self.q.new_empty(size)
        return buffers[name][:size].view(shape)

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
        """A view of the tile's keys or values, reversed, [b·g, n, F]."""
        last = self.problem.num_keys
        x = x_BGNF[tile.batch, tile.kv_heads, last - tile.keys.stop : last - tile.keys.start]
        return x.view(-1, *x.shape[2:])

    def entries(self, table_GRX: Tensor, tile: Tile) -> Tensor:
        """A view of the m + n − 1 entries of the table that the tile uses, [g, r, x]."""
        first = tile.rows.start + self.problem.num_keys - tile.keys.stop
        last = tile.rows.stop + self.problem.num_keys - tile.keys.start - 1
        return table_GRX[tile.kv_heads, tile.members, first:last]

    def shape(self, tile: Tile) -> tuple[int, int, int, int, int]:
        b, g, r, m, n = (part.stop - part.start for part in tile)
        return b, g, r, m, n

    def row_weights(self, tile: Tile) -> Tensor:
        """The factor of the prior in each row's logits, [1 or b, g, r, m, 1]."""
        if self.prior_scale is None:
            return self.q.new_ones(()).expand(1, *self.shape(tile)[1:4], 1)
        return self.rows(self.prior_scale, tile)

    def prior_view(self, tile: Tile) -> Tensor:
        """The log-prior of each logit of the tile, [g, r, m, n], without its mask; a view of the table."""
        return self.entries(self.prior, tile).unfold(-1, tile.keys.stop - tile.keys.start, 1)

    def posterior(self, tile: Tile) -> Tensor:
        """Softmax of the tile's logits, [b·g, r·m, n]."""
        b, g, r, m, n = self.shape(tile)
        logits = self.buffer("logits", (b, g, r, m, n))
        if self.prior_scale is None:
            logits.copy_(self.entries(self.masked_prior, tile).unfold(-1, n, 1))
        else:
            torch.mul(self.prior_view(tile), self.row_weights(tile).expand(b, g, r, m, 1), out=logits)
            logits += self.entries(self.mask, tile).unfold(-1, n, 1)
        if self.problem.documents is not None:
            start, stop = self.problem.documents[tile.batch, tile.rows, None].unbind(-1)
            j = torch.arange(tile.keys.stop - 1, tile.keys.start - 1, -1, device=logits.device)
            logits.masked_fill_(((j < start) | (j >= stop))[:, None, None], MASKED)
        flat = logits.view(b * g, r * m, n)
        flat.baddbmm_(self.flat_rows(self.scaled_q, tile), self.keys(self.k, tile).mT)
        return torch.softmax(flat, -1, out=self.buffer("posterior", flat.shape))

    def sheared(self, dlogits: Tensor) -> Tensor:
        """[b, g, r, m, n] as [b, g, r, m, x] with row i moved i columns to the right and zeros around it.

        Column i + j' then holds the gradients of all logits that used entry i + j' of the table. Rows are written n + m
        apart and read n + m − 1 apart.
        """
        m, n = dlogits.shape[-2:]
        room = self.buffer("sheared", (*dlogits.shape[:-1], n + m))
        room[..., :n] = dlogits
        room[..., n:] = 0.0
        return room.flatten(3)[..., : m * (n + m - 1)].unflatten(-1, (m, n + m - 1))


def _tiles(problem: Problem, tiles: TileLimits = DEFAULT_TILES, limits: PlanLimits = DEFAULT_LIMITS) -> Iterator[Tile]:
    """Cut the problem into tiles of bounded size: fewer rows first, then fewer heads, then fewer sequences.

    Tiles come in order from the last rows: a causal tile is then never larger than the one before, and buffers are
    allocated once.
    """
    batch, heads, queries, _ = problem.q.shape
    kv_heads, keys = problem.k.shape[1:3]
    if 0 in (batch, queries, keys):
        return
    if (made := plan(problem, limits)) is not None:
        yield from _planned_tiles(problem, made, tiles)
        return
    rows = min(queries, tiles.most_rows, max(tiles.least_rows, tiles.elements // keys))
    members = max(1, min(problem.group, tiles.elements // (rows * keys)))
    kv_step = max(1, min(kv_heads, tiles.elements // (rows * keys * members))) if members == problem.group else 1
    b_step = max(1, tiles.elements // (rows * keys * heads)) if kv_step == kv_heads and members == problem.group else 1
    for b in _slices(batch, b_step):
        for row, key in _row_blocks(problem, b, rows):
            for g in _slices(kv_heads, kv_step):
                for r in _slices(problem.group, members):
                    yield Tile(b, g, r, row, key)


def _planned_tiles(problem: Problem, made: Plan, tiles: TileLimits) -> Iterator[Tile]:
    """Tiles of one sequence and one head each, since each has its own range of keys."""
    starts, stops = made.start.tolist(), made.stop.tolist()
    for b in range(len(problem.q)):
        for row, key in _row_blocks(problem, slice(b, b + 1), made.rows):
            block = row.start // made.rows
            for h, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                keys = slice(max(key.start, start[block]), min(key.stop, stop[block]))
                if keys.start >= keys.stop:
                    continue
                g, r = divmod(h, problem.group)
                step = max(tiles.least_rows, tiles.elements // (keys.stop - keys.start))
                for part in _slices(row.stop - row.start, step):
                    rows = slice(row.start + part.start, row.start + part.stop)
                    yield Tile(slice(b, b + 1), slice(g, g + 1), slice(r, r + 1), rows, keys)


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


def _softmax_backward(grad: Tensor, posterior: Tensor, out: Tensor) -> Tensor:
    """posterior · (grad − Σ posterior · grad), fused.

    It is exactly zero where one key has all the mass. There the prior may be so steep in its parameters that a rounding
    error would become a visible gradient.
    """
    torch.ops.aten._softmax_backward_data.out(grad, posterior, -1, grad.dtype, grad_input=out)
    return out
