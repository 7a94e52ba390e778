"""Exact attention on the CPU at the speed of PyTorch's fused kernel, forward only; blockwise has the backward pass.

The kernel behind `scaled_dot_product_attention` takes an additive mask of any strides. With the queries in reverse
order, the log-prior of reversed row i' and key j is entry i' + j of the reversed table. A window sliding over that
table is the whole mask and takes no memory. If the query scale multiplies the prior, the mask is that view times a
number per row. It is then written out, for some rows of few heads at a time. Packed documents are computed one by one,
each over its own keys.

Shape letters: B batch, H heads, M queries, N keys, X table entries; lower case for the part of each in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesattn.attention.plan import DEFAULT_LIMITS, Plan, PlanLimits, plan_each_head
from bayesattn.attention.problem import Problem, Solution

# The kernel itself: `scaled_dot_product_attention` keeps its log-sum-exp to itself.
fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# Speed of the fused kernel on blocks of so many times the rows of a plan, relative to the largest.
EFFICIENCY = {1: 0.7, 2: 0.8, 4: 0.9, 8: 1.0}
# Heads share a block if none of them computes more than this many times its own keys for it.
MOST_SHARED_WORK = 1.02


@dataclass(frozen=True)
class BlockLimits:
    """How large a block may be.

    Many rows let the fused kernel use its larger tiles. Few rows, at most one in `share_of_keys` of the keys, compute
    less of the future of a block's first rows in vain. A bias that is written out takes as many heads as fit into
    `good_buffer` elements, and fewer rows where one head would exceed `largest_buffer`.
    """

    most_rows: int = 1024
    least_rows: int = 256
    share_of_keys: int = 8
    good_buffer: int = 2**21
    largest_buffer: int = 2**24


DEFAULT_BLOCKS = BlockLimits()


def obstacle(problem: Problem) -> str | None:
    """Why this kernel cannot solve the problem, or None."""
    if problem.q.device.type != "cpu":
        return f"runs on the CPU only and the inputs are on {problem.q.device}"
    if problem.v.shape[-1] != problem.q.shape[-1]:
        return f"needs v to have the head size of q, {problem.q.shape[-1]}, and v has {problem.v.shape[-1]}"
    return None


def forward(problem: Problem, blocks: BlockLimits = DEFAULT_BLOCKS, limits: PlanLimits = DEFAULT_LIMITS) -> Solution:
    """The output, and the log-sum-exp, which the fused kernel makes anyway, if it is wanted."""
    made = plan_each_head(problem, limits)
    if problem.group == 1:
        return problem.solution(*_one_head_per_key_head(problem, made, blocks, limits))
    # As many problems as query heads share a key head, over the same keys and values.
    parts = []
    for number in range(problem.group):
        heads = slice(number, None, problem.group)
        scale = None if problem.query_scale is None else problem.query_scale[:, heads]
        member = replace(problem, q=problem.q[:, heads], log_prior=problem.log_prior[heads], query_scale=scale)
        of_member = None if made is None else made.of_heads(heads)
        parts.append(_one_head_per_key_head(member, of_member, blocks, limits))
    out, lse = (torch.stack(part, 2).flatten(1, 2) for part in zip(*parts, strict=True))
    return problem.solution(out, lse)


def _one_head_per_key_head(
    problem: Problem, made: Plan | None, blocks: BlockLimits, limits: PlanLimits
) -> tuple[Tensor, Tensor]:
    p, dtype = problem, problem.dtype
    if made is not None and not made.pays(limits):
        made = None
    # The fused kernel reads rows of stride 1.
    q, k, v = (x.to(dtype) if x.stride(-1) == 1 else x.to(dtype).contiguous() for x in (p.q, p.k, p.v))
    scale = None if p.query_scale is None else p.query_scale.to(dtype).unsqueeze(-1)
    q = (q if scale is None else q * scale).flip(2)
    bias = _Bias(p, scale.flip(2) if p.scale_prior and scale is not None else None, blocks)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf)
    for batch, heads, rows, keys in _blocks(p, made, bias.most_rows):
        reverse = slice(p.num_queries - rows.stop, p.num_queries - rows.start)
        for part, some, mask in bias.of(batch, heads, reverse, keys):
            out[part, some, reverse], lse[part, some, reverse] = fused_attention(
                q[part, some, reverse], k[part, some, keys], v[part, some, keys], attn_mask=mask, scale=p.softmax_scale
            )
    return out.flip(2), lse.flip(2)


class _Bias:
    """The additive mask of a block: a view of the table, or a buffer where the query scale multiplies the prior."""

    def __init__(self, problem: Problem, scale_BHM1: Tensor | None, limits: BlockLimits) -> None:
        self.num_keys, self.limits = problem.num_keys, limits
        self.scale = scale_BHM1
        self.prior, self.mask = (x.flip(-1) for x in problem.prior_and_mask())
        self.masked_prior = self.prior + self.mask
        self.buffer = self.prior.new_empty(0)

    @property
    def most_rows(self) -> int:
        limits = self.limits
        rows = min(limits.most_rows, max(limits.least_rows, self.num_keys // limits.share_of_keys))
        return rows if self.scale is None else max(1, min(rows, limits.largest_buffer // max(1, self.num_keys)))

    def of(self, batch: slice, heads: slice, rows: slice, keys: slice) -> Iterator[tuple[slice, slice, Tensor]]:
        """The block of reversed rows in parts: (sequences, heads, mask [1, h, m, n])."""
        n = keys.stop - keys.start
        entries = slice(rows.start + keys.start, rows.stop + keys.stop - 1)
        if self.scale is None:
            yield batch, heads, self.masked_prior[None, heads, entries].unfold(-1, n, 1)
            return
        step = max(1, self.limits.good_buffer // ((rows.stop - rows.start) * n))
        shared = len(self.scale) == 1
        for part in [batch] if shared else [slice(b, b + 1) for b in range(batch.start, batch.stop)]:
            scale = self.scale[0 if shared else part.start]
            for first in range(heads.start, heads.stop, step):
                some = slice(first, min(first + step, heads.stop))
                yield part, some, self._write(self.prior[some, entries], self.mask[some, entries], scale[some, rows])

    def _write(self, prior_hX: Tensor, mask_hX: Tensor, scale_hm1: Tensor) -> Tensor:
        h, m, _ = scale_hm1.shape
        n = prior_hX.shape[1] - m + 1
        if self.buffer.numel() < h * m * n:
            self.buffer = prior_hX.new_empty(h * m * n)
        bias = self.buffer[: h * m * n].view(h, m, n)
        torch.mul(prior_hX.unfold(-1, n, 1), scale_hm1, out=bias)
        hidden = mask_hX.any(0).nonzero()
        if len(hidden):  # most often the future, which is in the columns near the diagonal only
            columns = slice(max(0, int(hidden[0]) - m + 1), min(n, int(hidden[-1]) + 1))
            bias[..., columns] += mask_hX.unfold(-1, n, 1)[..., columns]
        return bias[None]


def _blocks(problem: Problem, made: Plan | None, step: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """(sequences, heads, rows, keys) that cover every key that any query needs.

    The largest blocks come first, so that buffers do not grow.
    """
    batch, heads, queries, _ = problem.q.shape
    if 0 in (batch, queries, problem.num_keys):
        return
    parts = [(slice(0, heads), step, None)] if made is None else list(_group_by_key_range(made, step))
    for sequences, first, last, start, stop in _documents(problem):
        for some_heads, rows_at_once, ranges in parts:
            for block in reversed(range(first // rows_at_once, -(-last // rows_at_once))):
                rows = slice(max(first, block * rows_at_once), min(last, (block + 1) * rows_at_once))
                lo, hi = 0, problem.visible_keys(rows.stop)
                if ranges is not None:
                    lo, hi = max(lo, ranges[0][block]), min(hi, ranges[1][block])
                if max(lo, start) < min(hi, stop):
                    yield sequences, some_heads, rows, slice(max(lo, start), min(hi, stop))


def _group_by_key_range(made: Plan, most_rows: int) -> Iterator[tuple[slice, int, tuple[list[int], list[int]]]]:
    """(heads, rows at once, (first keys, last keys) by block): neighbouring heads whose key ranges nearly agree.

    Blocks of more rows run faster but leave out less. Each head has the size that is best for it.
    """
    sizes = [made.coarser(factor) for factor in EFFICIENCY if made.rows * factor <= max(most_rows, made.rows)]
    costs = torch.stack([size.logits() / rate for size, rate in zip(sizes, EFFICIENCY.values(), strict=False)])
    best = costs.argmin(0).tolist()
    first, heads = 0, len(best)
    while first < heads:
        size = sizes[best[first]]
        start, stop, last = size.start[first], size.stop[first], first + 1
        while last < heads and best[last] == best[first]:
            wider = torch.minimum(start, size.start[last]), torch.maximum(stop, size.stop[last])
            needed = (size.stop[last] - size.start[last]).sum()
            if (wider[1] - wider[0]).sum() > MOST_SHARED_WORK * torch.minimum(needed, (stop - start).sum()):
                break
            (start, stop), last = wider, last + 1
        yield slice(first, last), size.rows, (start.tolist(), stop.tolist())
        first = last


def _documents(problem: Problem) -> Iterator[tuple[slice, int, int, int, int]]:
    """(sequences, first row, last row, first key, last key), ends excluded, of each document."""
    batch, queries = problem.q.shape[0], problem.num_queries
    if problem.documents is None:
        yield slice(0, batch), 0, queries, 0, problem.num_keys
        return
    changes = problem.documents.new_ones(batch, queries, dtype=torch.bool)
    changes[:, 1:] = (problem.documents[:, 1:] != problem.documents[:, :-1]).any(-1)
    starts = changes.nonzero()
    documents = torch.cat([starts, problem.documents[changes]], 1).tolist()
    for (b, row, start, stop), following in zip(documents, [*documents[1:], None], strict=True):
        last = queries if following is None or following[0] != b else following[1]
        yield slice(b, b + 1), row, last, start, stop
