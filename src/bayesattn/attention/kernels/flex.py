"""Exact attention on CUDA through FlexAttention.

The table and the query scale are in its score function, the plan in its block mask. The compiled kernel differentiates
through what the score function reads, so the prior and the query scale get gradients. On the CPU FlexAttention has no
backward pass and other kernels are faster: there it runs only if it is given by name.

Shape letters: B batch, H heads, M queries, N keys; I and J blocks of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from bayesattn.attention.plan import DEFAULT_LIMITS, PlanLimits, keep_everything, plan
from bayesattn.attention.problem import Problem, Solution

# Queries and keys of a block: the rows of a plan's block, so that each block has its own range.
BLOCK = DEFAULT_LIMITS.rows


def obstacle(problem: Problem) -> str | None:
    """Why this kernel cannot solve the problem, or None."""
    if problem.q.device.type not in ("cuda", "cpu"):
        return f"runs on CUDA, and on the CPU without gradients, and the inputs are on {problem.q.device}"
    inputs = (problem.q, problem.k, problem.v, problem.log_prior, problem.query_scale)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if problem.q.device.type == "cpu" and learns:
        return "has no gradients on the CPU"
    if problem.q.dtype == torch.float64:
        return "has no float64"
    if 0 in problem.q.shape or problem.num_keys == 0:
        return "needs at least one sequence, query and key"
    return None


def pays(problem: Problem) -> bool:
    """Whether the compiled kernel is worth its compilation: on CUDA, for more than a few queries."""
    return problem.q.device.type == "cuda" and problem.num_queries >= BLOCK and obstacle(problem) is None


def forward(problem: Problem, limits: PlanLimits = DEFAULT_LIMITS) -> Solution:
    """The output, and the log-sum-exp if it is wanted; both differentiable."""
    p = problem
    hidden = p.log_prior.isneginf()
    prior = p.log_prior.to(p.dtype).masked_fill(hidden, 0.0)
    visible = ~hidden
    scale = None if p.query_scale is None else p.query_scale.to(p.dtype).expand(p.q.shape[:3])
    last, documents = p.num_keys - 1, p.documents

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        bias = prior[h, i - j + last]
        if scale is None:
            return content + bias
        return scale[b, h, i] * (content + bias) if p.scale_prior else scale[b, h, i] * content + bias

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = visible[h, i - j + last]
        if documents is None:
            return seen
        return seen & (j >= documents[b, i, 0]) & (j < documents[b, i, 1])

    result = _attend()(
        p.q,
        p.k,
        p.v,
        score_mod=score,
        block_mask=_block_mask(p, mask, limits),
        scale=p.softmax_scale,
        enable_gqa=p.group > 1,
        return_aux=AuxRequest(lse=True) if p.needs_lse else None,
    )
    out, lse = (result[0], result[1].lse) if p.needs_lse else (result, None)
    if (masked := p.fully_masked()) is not None:
        out = out.masked_fill(masked.unsqueeze(-1), 0.0)
        lse = None if lse is None else lse.masked_fill(masked, -torch.inf)
    return Solution(out, lse)


def _block_mask(problem: Problem, mask: Any, limits: PlanLimits) -> BlockMask:
    """The blocks of keys that each block of queries needs by the plan; inside of these `mask` decides."""
    with torch.no_grad():
        made = plan(problem, limits) or keep_everything(problem, limits)
    queries, keys = problem.num_queries, problem.num_keys
    blocks = -(-keys // BLOCK)
    first, stop = made.start // BLOCK, -(-made.stop // BLOCK)  # [H, I]
    number = (stop - first).clamp(min=0)
    # The indices of the blocks needed come first, in order; the rest is not read.
    indices = (first.unsqueeze(-1) + torch.arange(blocks, device=first.device)) % max(1, blocks)
    return BlockMask.from_kv_blocks(
        number.int().unsqueeze(0),
        indices.int().unsqueeze(0),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask,
        seq_lengths=(queries, keys),
    )


@cache
def _attend() -> Any:
    return torch.compile(flex_attention, dynamic=False)
