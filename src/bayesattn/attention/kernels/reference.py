"""The specification in code: dense, obvious, differentiable by autograd. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.problem import Problem, Solution
from bayesattn.priors.conditioned import evaluate_rows, find_family


def forward(problem: Problem) -> Solution:
    """The output, and the log-sum-exp if it is wanted; both differentiable."""
    logits = all_logits(problem)
    v = problem.v.repeat_interleave(problem.group, dim=1).to(problem.dtype)
    out = (softmax_of_visible(logits) @ v).to(problem.q.dtype)
    return Solution(out, logits.logsumexp(-1) if problem.needs_lse else None)


def posterior(problem: Problem) -> Tensor:
    """The weights of the values, `[B, H, M, N]` in working precision."""
    return softmax_of_visible(all_logits(problem))


def softmax_posterior(
    content: Tensor, log_prior: Tensor, visible: Tensor, query_scale: Tensor | None, scale_prior: bool
) -> Tensor:
    """Softmax over the visible keys of r · (content + log_prior), or of r · content + log_prior; all broadcast.

    `content` is softmax_scale · q·k. A log-prior of −inf hides its key as well. A row that sees nothing gets zeros.
    """
    return softmax_of_visible(masked_logits(content, log_prior, visible, query_scale, scale_prior))


def all_logits(problem: Problem) -> Tensor:
    """`[B, H, M, N]` in working precision, −inf for hidden keys."""
    p, dtype = problem, problem.dtype
    k = p.k.repeat_interleave(p.group, dim=1).to(dtype)
    content = p.softmax_scale * p.q.to(dtype) @ k.transpose(-1, -2)
    visible = torch.ones((), dtype=torch.bool, device=p.q.device)
    if p.documents is not None:
        start, stop = p.documents[:, None, :, None, :].unbind(-1)
        j = torch.arange(p.num_keys, device=p.q.device)
        visible = (start <= j) & (j < stop)
    query_scale = None if p.query_scale is None else p.query_scale.to(dtype)[..., None]
    log_prior = _by_query_and_key(p, p.log_prior.to(dtype))
    if p.parameters is not None:
        log_prior = log_prior + conditioned_rows(p)
    return masked_logits(content, log_prior, visible, query_scale, p.scale_prior)


def masked_logits(
    content: Tensor, log_prior: Tensor, visible: Tensor, query_scale: Tensor | None, scale_prior: bool
) -> Tensor:
    """r · (content + log_prior), or r · content + log_prior, −inf for keys that are hidden; all broadcast."""
    hidden = log_prior.isneginf()
    log_prior = log_prior.masked_fill(hidden, 0.0)  # 0 · −inf would be NaN, and so would its gradient
    if query_scale is None:
        logits = content + log_prior
    else:
        logits = query_scale * (content + log_prior) if scale_prior else query_scale * content + log_prior
    return torch.where(visible & ~hidden, logits, -torch.inf)


def softmax_of_visible(logits: Tensor) -> Tensor:
    """Over the keys; a row that sees nothing gets zeros."""
    return torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, logits.softmax(-1))


def conditioned_rows(problem: Problem) -> Tensor:
    """What the conditioned prior adds for query i and key j, `[1 or B, 1 or H, M, N]`."""
    p, dtype = problem, problem.dtype
    assert p.parameters is not None
    family = find_family(p.family)
    parameters, shared = p.parameters.to(dtype), tuple(x.to(dtype) for x in p.shared)
    i = torch.arange(p.num_queries, device=p.q.device, dtype=dtype)
    j = torch.arange(p.num_keys, device=p.q.device, dtype=dtype)
    if family.elementwise:
        return evaluate_rows(family, parameters, shared, p.offset + i[:, None] - j)
    each_distance = p.offset + torch.arange(1 - p.num_keys, p.num_queries, device=p.q.device, dtype=dtype)
    rows = evaluate_rows(family, parameters, shared, each_distance)
    entry = (i[:, None] - j).long() + p.num_keys - 1
    return rows.gather(-1, entry.expand(*rows.shape[:2], -1, -1))


def _by_query_and_key(problem: Problem, table: Tensor) -> Tensor:
    """Entry i − j + N − 1 of the table for query i and key j, `[H, M, N]`.

    A window that slides over the reversed table holds the rows of the queries, the last query first.
    """
    windows = pad(table, (0, 1)).flip(-1).unfold(-1, problem.num_keys, 1)  # padded, for there may be no queries
    # Not flip, whose result would keep the order of the view's strides and slow down all that follows.
    return windows.index_select(1, torch.arange(problem.num_queries, 0, -1, device=table.device))
