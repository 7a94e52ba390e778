"""Exact attention on the CPU at the speed of PyTorch's fused kernel; forward only, the backward pass is blockwise's.

`scaled_dot_product_attention` takes an additive mask of any strides. With the queries in reverse order, the log-prior
of reversed row i' and key j is entry i' + j of the reversed table, so a window sliding over that is the whole mask and
takes no memory. A prior that the query scale multiplies is that view times a number per row: it is written out, for
some rows of few heads at a time. Packed documents are computed one by one, each over its own keys.

Shape letters: B batch, H heads, M queries, X table entries; lower case for what is taken at a time, n of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.plan import Plan, plan
from bayesattn.attention.problem import Problem

# Rows at a time: many, for the fused kernel's larger tiles, but a small share of the keys: the future of a block's
# first rows is computed in vain.
MOST_ROWS, LEAST_ROWS = 1024, 256
SHARE_OF_KEYS = 8
# Speed of the fused kernel on blocks of so many times the rows of a plan, relative to the largest.
EFFICIENCY = {1: 0.7, 2: 0.8, 4: 0.9, 8: 1.0}
# Heads are computed together if none has to look at more than this many times its keys for it.
TOGETHER = 1.02
# Elements of a written-out bias: heads are taken together up to the first number, rows made fewer beyond the second.
GOOD_BUFFER, LARGEST_BUFFER = 2**21, 2**24


def obstacle(problem: Problem) -> str | None:
    """Why this kernel cannot solve the problem, or None."""
    if problem.q.device.type != "cpu":
        return f"runs on the CPU only and the inputs are on {problem.q.device}"
    if problem.v.shape[-1] != problem.q.shape[-1]:
        return f"needs v to have the head size of q, {problem.q.shape[-1]}, and v has {problem.v.shape[-1]}"
    return None


def forward(problem: Problem) -> Tensor:
    """The output `[B, H, M, D]` in the dtype of q."""
    if problem.group > 1:  # as many problems as query heads share a key head, over the same keys and values
        members = [forward(_member(problem, r)) for r in range(problem.group)]
        return torch.stack(members, 2).flatten(1, 2)
    p, dtype = problem, problem.dtype
    # Without a last stride of 1 the fused kernel would quietly be replaced by one that writes all logits out.
    q, k, v = (x.to(dtype) if x.stride(-1) == 1 else x.to(dtype).contiguous() for x in (p.q, p.k, p.v))
    scale = None if p.query_scale is None else p.query_scale.to(dtype).unsqueeze(-1)
    q = (q if scale is None else q * scale).flip(2)
    bias = _Bias(p, scale.flip(2) if p.scale_prior and scale is not None else None)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for batch, heads, rows, keys in _blocks(p, bias.most_rows):
        reverse = slice(p.num_queries - rows.stop, p.num_queries - rows.start)
        for part, some, mask in bias.of(batch, heads, reverse, keys):
            out[part, some, reverse] = scaled_dot_product_attention(
                q[part, some, reverse],
                k[part, some, keys],
                v[part, some, keys],
                attn_mask=mask,
                scale=p.softmax_scale,
            )
    return p.zero_blind(out.flip(2)).to(p.q.dtype)


def _member(problem: Problem, r: int) -> Problem:
    """The problem of the r-th query head of every key/value head."""
    every = slice(r, None, problem.group)
    scale = None if problem.query_scale is None else problem.query_scale[:, every]
    return replace(problem, q=problem.q[:, every], log_prior=problem.log_prior[every], query_scale=scale)


class _Bias:
    """The additive mask of a block: a view where the query scale leaves the prior alone, else written to a buffer."""

    def __init__(self, problem: Problem, scale_BHM1: Tensor | None) -> None:
        self.num_keys = problem.num_keys
        self.scale = scale_BHM1
        self.prior, self.mask = (x.flip(-1) for x in problem.prior_and_mask())
        self.masked_prior = self.prior + self.mask
        self.buffer = self.prior.new_empty(0)

    @property
    def most_rows(self) -> int:
        rows = min(MOST_ROWS, max(LEAST_ROWS, self.num_keys // SHARE_OF_KEYS))
        return rows if self.scale is None else max(1, min(rows, LARGEST_BUFFER // max(1, self.num_keys)))

    def of(self, batch: slice, heads: slice, rows: slice, keys: slice) -> Iterator[tuple[slice, slice, Tensor]]:
        """(sequences, heads, mask [1, h, m, n]) that together cover the block of reversed rows."""
        n = keys.stop - keys.start
        entries = slice(rows.start + keys.start, rows.stop + keys.stop - 1)
        if self.scale is None:
            yield batch, heads, self.masked_prior[None, heads, entries].unfold(-1, n, 1)
            return
        step = max(1, GOOD_BUFFER // ((rows.stop - rows.start) * n))
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
        if len(hidden):  # most often the future, which only the columns of the diagonal reach
            columns = slice(max(0, int(hidden[0]) - m + 1), min(n, int(hidden[-1]) + 1))
            bias[..., columns] += mask_hX.unfold(-1, n, 1)[..., columns]
        return bias[None]


def _blocks(problem: Problem, step: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """(sequences, heads, rows, keys) that cover all that matters to any query.

    The largest blocks come first, so that buffers do not grow.
    """
    batch, heads, queries, _ = problem.q.shape
    if 0 in (batch, queries, problem.num_keys):
        return
    made = plan(problem)
    parts = [(slice(0, heads), step, None)] if made is None else list(_alike(made, step))
    for sequences, first, last, start, stop in _documents(problem):
        for together, rows_at_once, ranges in parts:
            for block in reversed(range(first // rows_at_once, -(-last // rows_at_once))):
                rows = slice(max(first, block * rows_at_once), min(last, (block + 1) * rows_at_once))
                lo, hi = 0, problem.visible_keys(rows.stop)
                if ranges is not None:
                    lo, hi = max(lo, ranges[0][block]), min(hi, ranges[1][block])
                if max(lo, start) < min(hi, stop):
                    yield sequences, together, rows, slice(max(lo, start), min(hi, stop))


def _alike(made: Plan, most_rows: int) -> Iterator[tuple[slice, int, tuple[list[int], list[int]]]]:
    """(heads, rows at once, (first keys, last keys) by block): neighbouring heads that look at like keys together.

    Blocks of more rows run faster but cut less; each head has the size that is best for it.
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
            if (wider[1] - wider[0]).sum() > TOGETHER * torch.minimum(needed, (stop - start).sum()):
                break
            (start, stop), last = wider, last + 1
        yield slice(first, last), size.rows, (start.tolist(), stop.tolist())
        first = last


def _documents(problem: Problem) -> Iterator[tuple[slice, int, int, int, int]]:
    """(sequences, first row, last row, first key, last key), ends excluded, of each stretch of one document."""
    batch, queries = problem.q.shape[0], problem.num_queries
    if problem.documents is None:
        yield slice(0, batch), 0, queries, 0, problem.num_keys
        return
    changes = problem.documents.new_ones(batch, queries, dtype=torch.bool)
    changes[:, 1:] = (problem.documents[:, 1:] != problem.documents[:, :-1]).any(-1)
    starts = changes.nonzero()
    stretches = torch.cat([starts, problem.documents[changes]], 1).tolist()
    for (b, row, start, stop), following in zip(stretches, [*stretches[1:], None], strict=True):
        last = queries if following is None or following[0] != b else following[1]
        yield slice(b, b + 1), row, last, start, stop
