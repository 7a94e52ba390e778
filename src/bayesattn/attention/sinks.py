"""Attention with sinks: attention to the first keys of each document, merged with attention to the others.

The first part is a small dense product. The second is any kernel's, under the wrapped prior, and does not see the
sinks. With the log-sum-exp of each the two are attention to all keys:

    output = sigmoid(lse_1 − lse_2) · output_1 + sigmoid(lse_2 − lse_1) · output_2

What a plan leaves out of the second part is at most `tolerance` of that part's mass, so no more of the whole.

Shape letters: B batch, H query heads (or G key/value heads, R query heads of each), M queries, N keys, C sinks, D head
size, E value size, I blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.inputs import check_table
from bayesattn.attention.kernels import reference
from bayesattn.attention.kernels.finite import isolate
from bayesattn.attention.kernels.registry import solve, without_autocast
from bayesattn.attention.plan import Plan, keep_everything, plan
from bayesattn.attention.problem import Problem, Solution
from bayesattn.attention.sink_keys import SinkProblem, attend_to_sinks
from bayesattn.priors.sinks import GivenSinks, Sinks

AnySinks = Sinks | GivenSinks


def split_sinks(log_prior: Any) -> tuple[Any, AnySinks | None]:
    """The prior of the other keys, and the sinks if there are any."""
    return (log_prior.prior, log_prior) if isinstance(log_prior, AnySinks) else (log_prior, None)


def solve_with_sinks(problem: Problem, sinks: AnySinks | None, implementation: str) -> Solution:
    """`solve`, with sinks whose wrapped prior is that of the problem; or without any."""
    if sinks is None or problem.num_keys == 0:
        return solve(problem, implementation)
    log_prior = _log_prior(sinks, problem)
    if implementation == "reference":
        with without_autocast(problem.q):
            return _solve_densely(problem, log_prior)
    of_sinks, of_others = _split(problem, log_prior)
    others = solve(replace(of_others, needs_lse=True), implementation)
    if others.lse is None:
        raise ValueError(f"implementation {implementation!r} returns no log-sum-exp, which sinks need; use 'auto'")
    with without_autocast(problem.q):
        out, lse = merge(attend_to_sinks(of_sinks), (others.out, others.lse), problem.needs_lse)
    return Solution(out.to(problem.q.dtype), lse)


def posterior_with_sinks(problem: Problem, sinks: AnySinks) -> Tensor:
    """The weights of the values, `[B, H, M, N]` in working precision."""
    log_prior = _log_prior(sinks, problem)
    with without_autocast(problem.q):
        isolate(_split(problem, log_prior)[1])
        problem, broken_keys, broken_queries = _without_broken(problem)
        logits = _dense_logits(problem, log_prior)
        weights = reference.softmax_of_visible(logits)
        return weights.masked_fill(_broken(logits, broken_keys, broken_queries).unsqueeze(-1), torch.nan)


def plan_with_sinks(problem: Problem, sinks: AnySinks) -> Plan:
    """The plan of the other keys, in positions of all keys, with the sinks that each block computes."""
    _, others = _split(problem, _log_prior(sinks, problem))
    made, shift = plan(others) or keep_everything(others), problem.num_keys - others.num_keys
    everything = keep_everything(problem).visible
    return SinksPlan(
        made.start + shift, made.stop + shift, everything, made.rows, made.flops_per_logit,
        sinks=everything - keep_everything(others).visible,
    )  # fmt: skip


@dataclass(frozen=True)
class SinksPlan(Plan):
    """A plan of which each block computes its sinks as well, whatever its range of keys."""

    sinks: Tensor  # [I]

    def coarser(self, factor: int) -> SinksPlan:
        sinks = pad(self.sinks, (0, -len(self.sinks) % factor)).unflatten(-1, (-1, factor)).amax(-1)
        return replace(cast(SinksPlan, super().coarser(factor)), sinks=sinks)

    def logits(self) -> Tensor:
        return super().logits() + self.rows * self.sinks.sum()

    def kept(self) -> Tensor:
        return ((self.stop - self.start).sum(-1) + self.sinks.sum()) / self.visible.sum().clamp(min=1)


def _log_prior(sinks: AnySinks, problem: Problem) -> Tensor:
    """The log-prior of the sinks in working precision, `[H, C]`, −inf for one that is hidden; or an error."""
    table = sinks.log_prior
    if table.device != problem.q.device:
        raise ValueError(f"Sinks is on {table.device} and q on {problem.q.device}; move the sinks to q's device")
    return check_table("Sinks", table.to(problem.dtype))


def _split(problem: Problem, log_prior_HC: Tensor) -> tuple[SinkProblem, Problem]:
    """The problem of the sinks and that of the other keys.

    Without documents keys and values are cut in two, which their gradients join again. With documents each of them has
    later first keys.
    """
    p, count = problem, log_prior_HC.shape[1]
    if p.documents is None and torch.compiler.is_exporting():  # an exported program is for any length
        start = torch.zeros(p.q.shape[0], p.num_queries, dtype=torch.long, device=p.q.device)
        p = replace(p, documents=torch.stack([start, torch.full_like(start, p.num_keys)], -1))
    k, v = (p.k, p.k), (p.v, p.v)
    if p.documents is None:
        count = min(count, p.num_keys)
        k, v = (x.split([count, p.num_keys - count], 2) for x in (p.k, p.v))
        entries = max(0, p.log_prior.shape[1] - count)
        others = replace(p, k=k[1], v=v[1], log_prior=p.log_prior[:, :entries], offset=p.offset - count)
    else:
        start, stop = p.documents.unbind(-1)
        nothing = start + count >= stop
        shortened = (start + count).masked_fill(nothing, p.num_keys), stop.masked_fill(nothing, 0)
        others = replace(p, documents=torch.stack(shortened, -1))
    sinks = SinkProblem(
        p.q, k[0], v[0], log_prior_HC[:, :count], p.query_scale, p.documents, softmax_scale=p.softmax_scale,
        scale_prior=p.scale_prior, causal=p.causal, offset=p.offset,
    )  # fmt: skip
    return sinks, others


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention to the keys of both, and its log-sum-exp if it is wanted, from the output and log-sum-exp of each.

    Where one part is NaN, or a query sees nothing in either, each has half a share. That is no function of the log-sum-
    exps, so that no gradient of NaN comes from there: an output without a gradient passes none.
    """
    (out_1, lse_1), (out_2, lse_2) = first, second
    difference = lse_1 - lse_2
    difference = torch.where(difference.isnan(), 0.0, difference)
    lse = torch.maximum(lse_1, lse_2) + (-difference.abs()).exp().log1p() if needs_lse else None
    return torch.lerp(out_2.to(out_1.dtype), out_1, difference.sigmoid().unsqueeze(-1)), lse


def _solve_densely(problem: Problem, log_prior_HC: Tensor) -> Solution:
    """The specification: the reference with the columns of the sinks replaced."""
    p = problem
    isolate(_split(p, log_prior_HC)[1])  # raises what it raises without sinks
    p, broken_keys, broken_queries = _without_broken(p)
    logits = _dense_logits(p, log_prior_HC)
    broken = _broken(logits, broken_keys, broken_queries)
    out = reference.softmax_of_visible(logits) @ p.v.repeat_interleave(p.group, dim=1).to(p.dtype)
    lse = logits.logsumexp(-1).masked_fill(broken, torch.nan) if p.needs_lse else None
    return Solution(out.masked_fill(broken.unsqueeze(-1), torch.nan).to(p.q.dtype), lse)


def _dense_logits(problem: Problem, log_prior_HC: Tensor) -> Tensor:
    """`[B, H, M, N]` in working precision, −inf for hidden keys."""
    p, count = problem, log_prior_HC.shape[1]
    j = torch.arange(p.num_keys, device=p.q.device)
    position = torch.arange(p.offset, p.offset + p.num_queries, device=p.q.device)[:, None]
    if p.documents is None:
        start, stop = torch.zeros_like(position), torch.full_like(position, p.num_keys)
    else:
        start, stop = p.documents.unsqueeze(-1).unbind(2)  # [B, M, 1]
    visible = (start <= j) & (j < stop)
    if p.causal:
        visible = visible & (j <= position)
    slot = j - start  # [M, N] or [B, M, N]
    prior = log_prior_HC[:, slot.clamp(0, count - 1)].movedim(0, -3)
    k = p.k.repeat_interleave(p.group, dim=1).to(p.dtype)
    content = p.softmax_scale * p.q.to(p.dtype) @ k.mT
    scale = None if p.query_scale is None else p.query_scale.to(p.dtype)[..., None]
    of_sinks = reference.masked_logits(content, prior, visible.unsqueeze(-3), scale, p.scale_prior)
    is_sink = (slot >= 0) & (slot < count)
    return torch.where(is_sink.unsqueeze(-3), of_sinks, reference.all_logits(p))


def _without_broken(problem: Problem) -> tuple[Problem, Tensor, Tensor]:
    """The problem with zeros for what is not finite, and which keys `[B, G, N]` and queries `[B, H, M]` have that."""
    p = problem
    broken_keys = ~(p.k.isfinite().all(-1) & p.v.isfinite().all(-1))
    k, v = (x.masked_fill(broken_keys[..., None], 0.0) for x in (p.k, p.v))
    broken_queries = ~p.q.isfinite().all(-1)
    return replace(p, q=p.q.masked_fill(~p.q.isfinite(), 0.0), k=k, v=v), broken_keys, broken_queries


def _broken(logits: Tensor, broken_keys: Tensor, broken_queries: Tensor) -> Tensor:
    """Which queries are not finite, or see a key that is not, `[B, H, M]`."""
    seen = ~logits.isneginf()
    group = logits.shape[1] // broken_keys.shape[1]
    sees_broken = (seen & broken_keys.repeat_interleave(group, dim=1).unsqueeze(-2)).any(-1)
    return sees_broken | (broken_queries & seen.any(-1))
