"""Certified pruning: which keys can matter to a block of queries, by the prior and a bound on the content.

The content logits of query i lie within ±u_i, the bound of bounds.py. One key that the prior favours is scored
exactly; its logit l_i is a lower bound of the row's log-sum-exp. So the posterior mass of a set of distances is at most

    Σ exp(scaled log-prior of the distance) · exp(u_i − l_i),

a sum over the table alone times a number per row. Each head and block of rows keeps one range of distances. It is the
shortest for which the bound leaves at most half of the tolerance to nearer keys and half to farther ones. For a head
that would keep a wide range, more of its likeliest keys are scored: l_i is their log-sum-exp, and the range shrinks.

Shape letters: B batch, H heads, M queries, N keys, D head size, I blocks of rows, X table entries, Z bins of entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.bounds import content_bound, likeliest_entry
from bayesattn.attention.plan_rows import could_cut, kept_entries
from bayesattn.attention.problem import Problem

# A block's scaled prior is bounded by that at the next lower of these ratios to the head's largest scale.
SCALE_STEP = 1.1
SCALE_LEVELS = 32
# The tolerance at which it is decided whether a head keeps a wide range of keys.
WIDE_AT = 1e-6
# Bins under a conditioned prior, which are bounded for each query, are this many times larger.
COARSER_BINS = 4
# Rows of one head whose products are formed at a time: few enough for the processor's cache.
AT_ONCE = 8192


@dataclass(frozen=True)
class PlanLimits:
    """When a plan is made and how fine it is. The defaults are for speed; tests plan smaller problems.

    Args:
        rows, bin: rows of a block and table entries of a bin. A cut is placed no finer, which makes finding it cheap.
        least_queries: for fewer queries, reading every key once costs more than it saves.
        most_kept: a plan that leaves more than this share of the work is not worth its smaller tiles.
        wide, scored: a head that keeps at least `wide` keys has `scored` keys more scored exactly.
    """

    rows: int = 128
    bin: int = 32
    least_queries: int = 2048
    most_kept: float = 0.9
    wide: int = 2048
    scored: int = 7


DEFAULT_LIMITS = PlanLimits()


@dataclass(frozen=True)
class Plan:
    """Block b of `rows` queries of head h needs keys `start[h, b]` … `stop[h, b]` − 1 and no others."""

    start: Tensor  # [H, I]
    stop: Tensor  # [H, I]
    visible: Tensor  # [I]: how many keys each block sees by causality and documents
    rows: int
    flops_per_logit: int  # of the two matrix products, over the batch

    def coarser(self, factor: int) -> Plan:
        """The plan with blocks of `factor` times the rows; each needs the keys that any of its parts needs."""
        missing = (0, -self.start.shape[1] % factor)
        start = pad(self.start, missing, value=torch.iinfo(torch.int64).max).unflatten(-1, (-1, factor)).amin(-1)
        stop = pad(self.stop, missing).unflatten(-1, (-1, factor)).amax(-1)
        visible = pad(self.visible, missing).unflatten(-1, (-1, factor)).amax(-1)
        return replace(self, start=start, stop=stop, visible=visible, rows=self.rows * factor)

    def of_heads(self, heads: slice) -> Plan:
        """The plan of some heads."""
        return replace(self, start=self.start[heads], stop=self.stop[heads])

    def logits(self) -> Tensor:
        """How many logits of each head are computed, `[H]`."""
        return self.rows * (self.stop - self.start).sum(-1)

    def kept(self) -> Tensor:
        """Share of the visible blocks of rows × keys that remain, `[H]`."""
        return (self.stop - self.start).sum(-1) / self.visible.sum().clamp(min=1)

    def pays(self, limits: PlanLimits) -> bool:
        """Whether it leaves out enough to be worth its smaller tiles."""
        return bool(self.kept().mean() <= limits.most_kept)

    def flops(self) -> Tensor:
        """Of the two matrix products of each head, `[H]`."""
        return self.flops_per_logit * self.logits()

    def __str__(self) -> str:
        lines = ["head    kept      GFLOP  keys per block"]
        for h, (share, flops) in enumerate(zip(self.kept().tolist(), self.flops().tolist(), strict=True)):
            width = (self.stop[h] - self.start[h]).double().mean().item()
            lines.append(f"{h:4} {share:7.2%} {flops / 1e9:10.2f}  {width:,.0f} for {self.rows} queries")
        everything = self.flops_per_logit * self.rows * int(self.visible.sum()) * len(self.start)
        return "\n".join(
            [*lines, f" all {self.kept().mean():7.2%} {self.flops().sum() / 1e9:10.2f}  of {everything / 1e9:,.2f}"]
        )


def plan(problem: Problem, limits: PlanLimits = DEFAULT_LIMITS) -> Plan | None:
    """The plan for the problem's tolerance, or None where pruning cannot pay.

    With tolerance 0 only keys whose weight is zero in the working precision are left out.
    """
    made = plan_each_head(problem, limits)
    return made if made is not None and made.pays(limits) else None


def plan_each_head(problem: Problem, limits: PlanLimits = DEFAULT_LIMITS) -> Plan | None:
    """The plan even if it does not pay over all heads, since it may for some. None if nothing can be left out."""
    queries, keys = problem.num_queries, problem.num_keys
    if queries < limits.least_queries or 0 in problem.q.shape or keys == 0 or problem.q.device.type == "mps":
        return None  # MPS has no float64, which the bounds need
    future = min(max(0, keys - 1 - problem.offset), problem.log_prior.shape[1]) if problem.causal else 0
    table = problem.log_prior[:, future:].double()
    if table.numel() == 0:
        return None
    if problem.parameters is not None:
        if not could_cut(problem, table):
            return None
        bins = limits.bin * COARSER_BINS
        first, last = kept_entries(problem, future, _log_allowed(problem), limits.rows, bins)
        return _plan_of_entries(problem, first, last, limits)
    peak = table.amax(-1, keepdim=True)
    table = table - peak.where(peak.isfinite(), 0.0)  # not in place: a float64 table is the caller's
    if not _could_cut(problem, table):
        return None
    bound = _RowBounds(problem, table, future)
    if problem.documents is None:
        worst = bound.by_block(limits.rows)
        first, last = _kept_entries(table, *worst, math.log(WIDE_AT / 2), limits.bin)
        width = (last - first).double().mean(-1)
        wide = (width >= limits.wide) & (width < table.shape[1])  # where nothing could be cut nothing will be
        bound.tighten(wide, limits.scored)
    worst = bound.by_block(limits.rows)
    first, last = (future + entry for entry in _kept_entries(table, *worst, _log_allowed(problem), limits.bin))
    return _plan_of_entries(problem, first, last, limits)


def _plan_of_entries(problem: Problem, first: Tensor, last: Tensor, limits: PlanLimits) -> Plan:
    """The plan under which each head and block keeps the entries `first` … `last` − 1 of the table, `[H, I]`."""
    queries, keys = problem.num_queries, problem.num_keys
    everything = keep_everything(problem, limits)
    low, high = everything.start, everything.stop
    begin = torch.arange(0, queries, limits.rows, device=first.device)
    end = (begin + limits.rows).clamp(max=queries)
    start = torch.minimum(torch.maximum(begin + keys - last, low), high)
    stop = torch.maximum(torch.minimum(end + keys - 1 - first, high), start)
    return replace(everything, start=start, stop=stop)


def keep_everything(problem: Problem, limits: PlanLimits = DEFAULT_LIMITS) -> Plan:
    """The plan that leaves out only keys which causality or documents hide from a whole block."""
    queries, keys, rows = problem.num_queries, problem.num_keys, limits.rows
    end = (torch.arange(0, queries, rows, device=problem.q.device) + rows).clamp(max=queries)
    low, high = torch.zeros_like(end), torch.full_like(end, keys)
    if problem.causal:
        high = (end + problem.offset).clamp(0, keys)
    if problem.documents is not None and len(problem.documents):
        low = _by_block(problem.documents[..., 0], rows, keys).amin((0, 2))
        high = torch.minimum(high, _by_block(problem.documents[..., 1], rows, 0).amax((0, 2)))
    high = torch.maximum(low, high)
    heads = problem.q.shape[1]
    work = 2 * len(problem.q) * (problem.q.shape[-1] + problem.v.shape[-1])
    return Plan(low.expand(heads, -1), high.expand(heads, -1), high - low, rows, work)


def _could_cut(problem: Problem, table: Tensor) -> bool:
    """Whether the least likely distance is unlikely enough for any cut, judged by the table alone."""
    scaled = problem.query_scale is not None and problem.scale_prior
    largest = problem.query_scale.abs().amax().double() if scaled else table.new_ones(())  # type: ignore[union-attr]
    return bool(table.amin() * largest.clamp(min=1e-30) <= _log_allowed(problem))


def _log_allowed(problem: Problem) -> float:
    """Log of the posterior mass that may be left out on either side."""
    if problem.tolerance > 0:
        return math.log(problem.tolerance / 2)
    # Weights below half of the smallest subnormal number are rounded to zero.
    lowest = (
        math.log(torch.finfo(problem.dtype).smallest_normal) + math.log(torch.finfo(problem.dtype).eps) - math.log(2)
    )
    return lowest - math.log(2 * problem.num_keys)


class _RowBounds:
    """u and l of each row, before any attention is computed.

    `table` is the log-prior relative to its peak, without its first `future` entries.
    """

    def __init__(self, problem: Problem, table: Tensor, future: int) -> None:
        self.problem, self.table, self.future = problem, table, future
        self.masked = problem.fully_masked()
        own = problem.num_keys - 1 - problem.offset  # entry of distance 0
        away = (torch.arange(future, future + table.shape[1], device=table.device) - own).abs()
        self.likely = future + likeliest_entry(table, away)  # [H]
        scale = problem.query_scale
        self.scale = None if scale is None else scale.double().expand(problem.q.shape[:3])
        self.largest, self.least = self._one_key()  # u and l, [B, H, M] each

    def _one_key(self) -> tuple[Tensor, Tensor]:
        p = self.problem
        row = torch.arange(p.num_queries, device=p.q.device)
        key = row + p.num_keys - 1 - self.likely[:, None]  # [H, M]
        if p.documents is not None:
            start, stop = p.documents.unsqueeze(1).unbind(-1)
            key = key.clamp(start, stop - 1)
        key = key.clamp(0, p.num_keys - 1).expand(len(p.q), *key.shape[-2:])
        # Entries of the future occur only for queries that see no key, which are left out in the end.
        entry = (row + p.num_keys - 1 - key - self.future).clamp(min=0)
        prior = self.table.expand(len(p.q), -1, -1).gather(-1, entry)

        content, query_norm = prior.new_empty(2, *prior.shape, dtype=p.dtype)
        key_norm = prior.new_zeros(*p.k.shape[:2], 1, dtype=p.dtype)
        seen, likely = p.visible_keys(p.num_queries), self.likely.tolist()
        sequence = torch.arange(len(p.q), device=p.q.device)[:, None]
        for h in range(p.q.shape[1]):
            k = p.k[:, h // p.group].to(p.dtype)
            for part in range(0, p.num_queries, AT_ONCE):
                rows = slice(part, part + AT_ONCE)
                q = p.q[:, h, rows].to(p.dtype)
                first = part + p.num_keys - 1 - likely[h]
                unbroken = p.documents is None and first >= 0 and first + q.shape[1] <= p.num_keys
                chosen = k[:, first : first + q.shape[1]] if unbroken else k[sequence, key[:, h, rows]]
                content[:, h, rows] = torch.linalg.vecdot(q, chosen)
                query_norm[:, h, rows] = q.norm(dim=-1)
            if seen and h % p.group == 0:
                norms = [some.norm(dim=-1).amax(-1) for some in k[:, :seen].split(AT_ONCE, 1)]
                key_norm[:, h // p.group, 0] = torch.stack(norms).amax(0)
        largest = content_bound(query_norm, key_norm.repeat_interleave(p.group, 1), p.softmax_scale, self.scale)
        content = content * p.softmax_scale
        if self.scale is not None:
            content = self.scale * content
            if p.scale_prior:
                prior = torch.where(prior.isneginf(), prior, self.scale * prior)
        return largest, content + prior

    def tighten(self, heads: Tensor, scored: int) -> None:
        """Raise l of the chosen heads to the log-sum-exp of the likeliest key and of the next `scored` farther ones."""
        p = self.problem
        for h in heads.nonzero().flatten().tolist():
            for farther in range(1, scored + 1):
                entry = int(self.likely[h]) + farther
                first = p.num_keys - 1 - entry  # key of the first row
                rows = slice(max(0, -first), min(p.num_queries, p.num_keys - first))
                if rows.stop <= rows.start or entry - self.future >= self.table.shape[1]:
                    continue
                prior = self.table[h, entry - self.future]
                if prior.isneginf():
                    continue
                q, k = p.q[:, h, rows], p.k[:, h // p.group, first + rows.start : first + rows.stop]
                logit = p.softmax_scale * torch.linalg.vecdot(q.to(p.dtype), k.to(p.dtype)).double()
                if self.scale is not None:
                    logit = self.scale[:, h, rows] * (logit + prior if p.scale_prior else logit)
                if self.scale is None or not p.scale_prior:
                    logit = logit + prior
                self.least[:, h, rows] = torch.logaddexp(self.least[:, h, rows], logit)

    def by_block(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """The largest u − l and the smallest scale of the prior in each block, over the batch; `[H, I]` each."""
        excess = self.largest - self.least
        # A NaN bounds nothing: keep every key, so that the NaN shows in the output.
        excess = excess.masked_fill(excess.isnan(), torch.inf)
        scale = self.scale
        if self.masked is not None:
            excess = excess.masked_fill(self.masked, -torch.inf)
            scale = None if scale is None else scale.masked_fill(self.masked, torch.inf)
        worst = _by_block(excess, rows, -torch.inf).amax(-1).amax(0)
        if scale is None or not self.problem.scale_prior:
            return worst, None
        return worst, _by_block(scale, rows, torch.inf).amin(-1).amin(0)


def _kept_entries(
    table: Tensor, excess_HI: Tensor, scale_HI: Tensor | None, log_allowed: float, bin_size: int
) -> tuple[Tensor, Tensor]:
    """First and last (excluded) entry of the table that each head and block keeps, `[H, I]` each."""
    heads, entries = table.shape
    bins = pad(table, (0, -entries % bin_size), value=-torch.inf).unflatten(-1, (-1, bin_size)).amax(-1)  # [H, Z]
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
        mass = (power * bins).exp() * bin_size + 1e-300  # what underflowed
        mass = torch.where(bins.isneginf(), 0.0, mass)
        far = mass.flip(-1).cumsum(-1).log()  # of the last z + 1 bins
        near = mass.cumsum(-1).log()  # of the first z + 1 bins
        here = level == number
        last = torch.where(here, bins.shape[1] - torch.searchsorted(far, allowed, right=True), last)
        first = torch.where(here, torch.searchsorted(near, allowed, right=True), first)
    return first * bin_size, last * bin_size


def _by_block(x_BHM: Tensor, rows: int, filler: float) -> Tensor:
    return pad(x_BHM, (0, -x_BHM.shape[-1] % rows), value=filler).unflatten(-1, (-1, rows))
