"""Exact attention on the CPU at the speed of PyTorch's fused kernel, forward only; blockwise has the backward pass.

The kernel behind `scaled_dot_product_attention` takes an additive mask whose rows may stand anywhere. With the queries
in reverse order, a window sliding over the table is the whole mask and takes no memory. If the query scale multiplies
the prior, or the prior depends on the query, the mask is written out, for some rows of few heads at a time; in the
second case for some of the keys at a time, and the log-sum-exp of each part makes them attention to all. Packed
documents are computed one by one, each over its own keys. Causal attention under a uniform prior is a single call of
the fused kernel, so that a model without a prior gets the very numbers it has from PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.kernels.bias import Bias, by_key
from bayesattn.attention.kernels.buffers import Buffers
from bayesattn.attention.kernels.rows import Part, Rows
from bayesattn.attention.kernels.threads import one_thread_each, share
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
    less of the future of a block's first rows in vain. A bias that is written out should fit the cache: it has
    `written_rows`, and as many heads as fit into `written_elements`. Under a conditioned prior it also has as many keys
    at a time as fit, but at least `written_keys`.
    """

    most_rows: int = 1024
    least_rows: int = 256
    share_of_keys: int = 8
    written_rows: int = 256
    written_elements: int = 2**20
    written_keys: int = 256


DEFAULT_BLOCKS = BlockLimits()


class Block(NamedTuple):
    """Some queries, and the keys they may see: in parts, one for each call of the fused kernel."""

    batch: slice
    heads: slice
    rows: slice
    keys: list[slice]


class _Written(NamedTuple):
    """How a bias that is written out is divided."""

    each_sequence: bool  # whether each has its own
    in_parts: bool  # whether some of the keys are taken at a time
    heads_at_once: bool  # whether all heads take little longer than one
    extent: int | None  # distances from here on have no bias; None if there are none


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
        member = problem.of_heads(heads)
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
    q = q if scale is None else q * scale
    if _is_plain(p):
        out, lse = fused_attention(q, k, v, is_causal=True, scale=p.softmax_scale)
        return out.contiguous(), lse
    prior_scale = scale if p.scale_prior else None
    bias, buffers = Bias(p, (p.q.shape[1],)), Buffers(dtype, p.q.device)
    rows_of_prior = None if p.parameters is None else Rows(p)
    written = None
    if prior_scale is not None or rows_of_prior is not None:
        sequences = max(len(x) for x in (prior_scale, p.parameters) if x is not None)
        extent = None if rows_of_prior is None or bias.reaches(rows_of_prior.extent) else rows_of_prior.extent
        at_once = rows_of_prior is not None and rows_of_prior.are_of_all_heads
        written = _Written(sequences > 1, rows_of_prior is not None, at_once, extent)
    else:
        q = q.flip(2)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf)

    def mask(b: slice, h: slice, rows: slice, keys: slice) -> Tensor | None:
        """What is added to the logits, `[1, h, m, n]`."""
        if written is None:
            return bias.windows((h,), rows, keys).unsqueeze(0)
        if written.extent is not None and keys.stop <= p.offset + rows.start - written.extent + 1:
            return None
        scale = None if prior_scale is None else prior_scale[0 if len(prior_scale) == 1 else b.start, h, rows]
        entries = bias.entries(rows, keys)
        room = buffers.get("by entry", (h.stop - h.start, rows.stop - rows.start, entries.stop - entries.start))
        bias.write((h,), entries, scale, room)
        written_out = by_key(room, keys.stop - keys.start).unsqueeze(0)
        if rows_of_prior is not None:
            scale = None if scale is None else scale.unsqueeze(0)
            rows_of_prior.add_to(written_out, Part(b, h, rows, keys), scale)
        return written_out

    def solve(block: Block) -> None:
        b, h, rows, parts = block
        place = rows if written is not None else slice(p.num_queries - rows.stop, p.num_queries - rows.start)
        result = None
        for keys in parts:
            of_part = fused_attention(
                q[b, h, place], k[b, h, keys], v[b, h, keys],
                attn_mask=mask(b, h, rows, keys), scale=p.softmax_scale,
            )  # fmt: skip
            result = of_part if result is None else _merge(result, of_part)
        assert result is not None
        out[b, h, place], lse[b, h, place] = result

    share(solve, list(_blocks(p, made, written, blocks)), one_thread_each(p))
    return (out, lse) if written is not None else (out.flip(2), lse.flip(2))


def _is_plain(problem: Problem) -> bool:
    """Whether it is causal attention of as many queries as keys in which all visible keys have a log-prior of 0.

    The fused kernel hides the future before it multiplies by the scale, so that must be positive in float32.
    """
    p = problem
    is_square = p.causal and p.offset == 0 and p.num_queries == p.num_keys and p.q.numel() > 0
    is_simple = p.documents is None and p.parameters is None and p.softmax_scale >= torch.finfo(torch.float32).tiny
    return is_square and is_simple and not p.log_prior[:, p.num_keys - 1 :].any()


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, and its log-sum-exp, which is finite: masked keys have logits of −1e30."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    return torch.lerp(out_1, out_2, (lse_2 - lse_1).sigmoid_().unsqueeze(-1)), torch.logaddexp(lse_1, lse_2)


def _blocks(problem: Problem, made: Plan | None, written: _Written | None, limits: BlockLimits) -> Iterator[Block]:
    """Blocks of the size that suits the bias."""
    most_rows = min(limits.most_rows, max(limits.least_rows, problem.num_keys // limits.share_of_keys))
    if written is not None:
        most_rows = min(most_rows, limits.written_rows)
    for b, h, rows, keys in _visible_blocks(problem, made, most_rows):
        if written is None:  # the bias is a view
            yield Block(b, h, rows, [keys])
            continue
        far = keys.start
        if written.extent is not None:
            far = min(keys.stop, max(far, problem.offset + rows.start - written.extent + 1))
        at_once = limits.written_elements // (rows.stop - rows.start)
        least_keys = limits.written_keys if written.heads_at_once else keys.stop - far
        step = max(1, at_once // max(1, min(least_keys, keys.stop - far)))
        for sequences in [slice(i, i + 1) for i in range(b.start, b.stop)] if written.each_sequence else [b]:
            for first in range(h.start, h.stop, step):
                heads = slice(first, min(first + step, h.stop))
                size = max(limits.written_keys, at_once // (heads.stop - heads.start))
                size = size if written.in_parts else keys.stop - keys.start
                parts = [slice(i, min(i + size, keys.stop)) for i in range(far, keys.stop, size)]
                yield Block(sequences, heads, rows, [slice(keys.start, far), *parts] if far > keys.start else parts)


def _visible_blocks(problem: Problem, made: Plan | None, step: int) -> Iterator[tuple[slice, slice, slice, slice]]:
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
