"""Certified pruning: which keys can matter to a block of queries, by the prior and a bound on the content.

The content logits of query i are at most u_i = |r_i|·σ·‖q_i‖·max‖k‖ in size. One key that the prior favours is scored
exactly; its logit l_i is a lower bound of the row's log-sum-exp. So the posterior mass of a set of distances is at most

    Σ exp(scaled log-prior of the distance) · exp(u_i − l_i),

a sum over the table alone times a number per row. What is kept is one range of distances per head and block of rows:
the shortest whose outside, nearer and farther, is bounded by half of the tolerance on either side.

Shape letters: B batch, H heads, M queries, N keys, D head size, I blocks of rows, X table entries, Z bins of entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.problem import Problem

# Rows of a block and entries of a bin. A cut is placed no finer, which costs little and makes finding it cheap.
ROWS = 128
BIN = 32
# Fewer queries than this do not repay a look at every key.
LEAST_QUERIES = 512
# A plan that leaves more than this share of the work is not worth its smaller tiles.
MOST_KEPT = 0.9
# A block's scaled prior is bounded by that at the next lower of these ratios to the head's largest scale.
SCALE_STEP = 1.1
SCALE_LEVELS = 32
# The likeliest key is looked for among those within this many nats of the prior's peak, nearest first.
NEAR_PEAK = 1.0


@dataclass(frozen=True)
class Plan:
    """Keys `start[h, b]` … `stop[h, b]` − 1 are all that block b of `rows` queries of head h needs to look at."""

    start: Tensor  # [H, I]
    stop: Tensor  # [H, I]
    visible: Tensor  # [I]: how many keys causality and documents leave to each block
    rows: int

    def coarser(self, factor: int) -> Plan:
        """The same with blocks of `factor` times the rows, which look at what any of them looked at."""
        missing = (0, -self.start.shape[1] % factor)
        start = pad(self.start, missing, value=torch.iinfo(torch.int64).max).unflatten(-1, (-1, factor)).amin(-1)
        stop = pad(self.stop, missing).unflatten(-1, (-1, factor)).amax(-1)
        visible = pad(self.visible, missing).unflatten(-1, (-1, factor)).amax(-1)
        return Plan(start, stop, visible, self.rows * factor)

    def cost(self) -> Tensor:
        """Logits computed, `[H]`."""
        return self.rows * (self.stop - self.start).sum(-1)

    def kept(self) -> Tensor:
        """Share of the visible blocks of rows × keys that remain, `[H]`."""
        return (self.stop - self.start).sum(-1) / self.visible.sum().clamp(min=1)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.2%}" for share in self.kept().tolist())
        return f"kept of each head: {shares}; {self.kept().mean():.2%} of the FLOPs of all"


def plan(problem: Problem) -> Plan | None:
    """The plan for the problem's tolerance, or None where pruning cannot pay.

    With tolerance 0 only keys whose weight is zero in the working precision are left out.
    """
    queries, keys = problem.num_queries, problem.num_keys
    if queries < LEAST_QUERIES or 0 in problem.q.shape or keys == 0 or problem.q.device.type == "mps":
        return None  # MPS has no float64, which the bounds need
    table = problem.log_prior.double()
    peak = table.amax(-1, keepdim=True)
    table = table - peak.where(peak.isfinite(), 0.0)
    if not _could_cut(problem, table):
        return None
    excess_HI, scale_HI = _excess(problem, table)
    first, last = _kept_entries(table, excess_HI, scale_HI, _log_allowed(problem))

    begin = torch.arange(0, queries, ROWS, device=table.device)
    end = (begin + ROWS).clamp(max=queries)
    low, high = torch.zeros_like(end), torch.full_like(end, keys)
    if problem.causal:
        high = (end + problem.offset).clamp(0, keys)
    if problem.documents is not None:
        low = _by_block(problem.documents[..., 0], keys).amin((0, 2))
        high = torch.minimum(high, _by_block(problem.documents[..., 1], 0).amax((0, 2)))
    high = torch.maximum(low, high)
    start = torch.minimum(torch.maximum(begin + keys - last, low), high)
    stop = torch.maximum(torch.minimum(end + keys - 1 - first, high), start)
    made = Plan(start, stop, high - low, ROWS)
    return made if made.kept().mean() <= MOST_KEPT else None


def _could_cut(problem: Problem, table: Tensor) -> bool:
    """Whether the least likely distance is unlikely enough at all; a look at the table alone."""
    past = table[:, max(0, problem.num_keys - 1 - problem.offset) :] if problem.causal else table
    if past.numel() == 0:
        return False
    scaled = problem.query_scale is not None and problem.scale_prior
    largest = problem.query_scale.abs().amax().double() if scaled else table.new_ones(())  # type: ignore[union-attr]
    return bool(past.amin() * largest.clamp(min=1e-30) <= _log_allowed(problem))


def _log_allowed(problem: Problem) -> float:
    """Log of the posterior mass that may be left out on either side."""
    if problem.tolerance > 0:
        return math.log(problem.tolerance / 2)
    # Weights below half of the smallest subnormal number are rounded to zero.
    lowest = (
        math.log(torch.finfo(problem.dtype).smallest_normal) + math.log(torch.finfo(problem.dtype).eps) - math.log(2)
    )
    return lowest - math.log(2 * problem.num_keys)


def _excess(problem: Problem, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """u − l of each block's worst row, and the least scale of the prior in it, over the batch; `[H, I]` each."""
    p = problem
    row = torch.arange(p.num_queries, device=p.q.device)
    zero = p.num_keys - 1 - p.offset
    away = (torch.arange(table.shape[1], device=table.device) - zero).abs()
    likely = away.masked_fill(table < -NEAR_PEAK, away.max() + 1).argmin(-1)  # [H], entry of the likeliest key

    key = row + p.num_keys - 1 - likely[:, None]  # [H, M]
    if p.documents is not None:
        start, stop = p.documents.unsqueeze(1).unbind(-1)
        key = key.clamp(start, stop - 1)
    key = key.clamp(0, p.num_keys - 1).expand(len(p.q), *key.shape[-2:])
    prior = table.expand(len(p.q), -1, -1).gather(-1, row + p.num_keys - 1 - key)

    content, bound = torch.empty_like(prior), torch.empty_like(prior)
    for h in range(len(table)):  # one head at a time: what is gathered is as large as its keys
        q, k = p.q[:, h].to(p.dtype), p.k[:, h // p.group].to(p.dtype)
        chosen = k.gather(1, key[:, h, :, None].expand(-1, -1, k.shape[-1]))
        content[:, h] = p.softmax_scale * (q * chosen).sum(-1)
        seen = k[:, : p.visible_keys(p.num_queries)]
        largest = seen.norm(dim=-1).amax(-1, keepdim=True) if seen.shape[1] else k.new_zeros(())
        bound[:, h] = abs(p.softmax_scale) * q.norm(dim=-1) * largest

    scale = None if p.query_scale is None else p.query_scale.double().expand_as(content)
    if scale is not None:
        content, bound = scale * content, scale.abs() * bound
        if p.scale_prior:
            prior = torch.where(prior.isneginf(), prior, scale * prior)
    # The norms and products above were rounded: a part in a thousand covers it at any size.
    excess = bound * 1.001 + 1e-3 - content - prior
    # A NaN bounds nothing: keep everything and let it show.
    excess = excess.masked_fill(excess.isnan(), torch.inf)
    blind = ~p.sees_something()
    excess = excess.masked_fill(blind, -torch.inf)
    worst = _by_block(excess, -torch.inf).amax(-1).amax(0)
    if scale is None or not p.scale_prior:
        return worst, None
    return worst, _by_block(scale.masked_fill(blind, torch.inf), torch.inf).amin(-1).amin(0)


def _kept_entries(
    table: Tensor, excess_HI: Tensor, scale_HI: Tensor | None, log_allowed: float
) -> tuple[Tensor, Tensor]:
    """First and last (excluded) entry of the table that each head and block keeps, `[H, I]` each."""
    heads, entries = table.shape
    bins = pad(table, (0, -entries % BIN), value=-torch.inf).unflatten(-1, (-1, BIN)).amax(-1)  # [H, Z]
    allowed = log_allowed - excess_HI
    if scale_HI is None:
        level, levels, largest = torch.zeros_like(allowed, dtype=torch.long), 1, allowed.new_ones(heads, 1)
    else:
        largest = scale_HI.masked_fill(scale_HI.isinf(), 0.0).amax(-1, keepdim=True).clamp(min=1e-30)
        ratio = (largest / scale_HI.clamp(min=1e-30)).log() / math.log(SCALE_STEP)
        level = ratio.ceil().clamp(0, SCALE_LEVELS).long()
        levels = int(level.amax()) + 1
        # Below the last level, at zero and below, the prior bounds nothing.
        allowed = torch.where((ratio > SCALE_LEVELS) | (scale_HI <= 0), -torch.inf, allowed)

    first = torch.zeros_like(level)
    last = torch.full_like(level, bins.shape[1])
    for number in range(levels):
        power = largest * SCALE_STEP**-number
        mass = torch.where(bins.isneginf(), 0.0, (power * bins).exp() * BIN)
        mass = mass + 1e-300  # what underflowed
        far = mass.flip(-1).cumsum(-1).log()  # of the last z + 1 bins
        near = mass.cumsum(-1).log()  # of the first z + 1 bins
        here = level == number
        last = torch.where(here, bins.shape[1] - torch.searchsorted(far, allowed, right=True), last)
        first = torch.where(here, torch.searchsorted(near, allowed, right=True), first)
    return first * BIN, last * BIN


def _by_block(x_BHM: Tensor, filler: float) -> Tensor:
    return pad(x_BHM, (0, -x_BHM.shape[-1] % ROWS), value=filler).unflatten(-1, (-1, ROWS))
