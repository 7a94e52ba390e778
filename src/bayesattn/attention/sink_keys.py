"""Attention to the sinks alone: the first keys of each document, with a log-prior each.

One product of every query with few keys, in memory linear in the number of tokens. It is an operator of its own, opaque
to `torch.compile`. Its backward pass computes the posterior again and needs no formula: it is the vector-Jacobian
product of the forward pass. With documents the queries are taken in blocks, each against the sinks of its documents.

Shape letters: B batch, H query heads (or G key/value heads, R query heads of each), M queries, N keys, C sinks of a
document, P documents of a sequence, D head size, E value size, F either; lower case for the part of each in a block, x
the sinks of all of its documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesattn.attention.inputs import all_finite, can_check
from bayesattn.attention.kernels.reference import masked_logits
from bayesattn.attention.kernels.registry import Operator, apply_operator, without_autocast
from bayesattn.errors import NotFiniteError

# Queries of a block. Each is multiplied with the sinks of all documents of its block.
ROWS = 256


@dataclass(frozen=True)
class SinkProblem:
    """logit[b, h, i, n] = r[b, h, i] · (softmax_scale · q[b, h, i]·k[b, g, first + n] + log_prior[h, n]), n < C.

    `first` is the first key of query i's document, or 0 without documents. −inf hides a sink. As in a `Problem`, r
    multiplies the content alone without `scale_prior`, and `documents` are ranges of keys.
    """

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, G, N, D], N at least C without documents
    v: Tensor  # [B, G, N, E]
    log_prior: Tensor  # [H, C], in working precision
    query_scale: Tensor | None  # [1 or B, H, M]
    documents: Tensor | None  # [B, M, 2]
    softmax_scale: float
    scale_prior: bool
    causal: bool
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """Of logits, softmax and sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def by_group(self, x: Tensor, dim: int = 1) -> Tensor:
        """[..., H, ...] as [..., G, R, ...]."""
        return x.unflatten(dim, (self.k.shape[1], -1))


LEARNED = ("q", "k", "v", "log_prior", "query_scale")
SETTINGS = ("softmax_scale", "scale_prior", "causal", "offset")


def attend_to_sinks(problem: SinkProblem) -> tuple[Tensor, Tensor]:
    """The output, `[B, H, M, E]`, and the log-sum-exp, `[B, H, M]`, both in working precision and differentiable.

    A query that sees no sink has zeros and −inf. One that sees a sink that is not finite, or is not itself, has NaN
    (on the CPU, as in all kernels).
    """
    settings = {name: getattr(problem, name) for name in SETTINGS}
    out, lse = apply_operator(_Attend, settings, *_tensors(problem))
    return out, lse


def attend_to_finite_sinks(problem: SinkProblem) -> tuple[Tensor, Tensor]:
    """The same without gradients, for inputs that are known to be finite: it takes a single query least time."""
    return _attend_to_finite(problem, *_blocks(problem))


class _Block(NamedTuple):
    """Some queries and the sinks of their documents."""

    rows: slice
    documents: Tensor | None  # [B, p]; None for the only one
    visible: Tensor  # [1 or B, 1, 1, x, m]


def _blocks(p: SinkProblem) -> tuple[list[_Block], Tensor | None]:
    """The blocks, and the first key of each document of a query, `[B, P]`, or None without documents."""
    queries, count = p.q.shape[2], p.log_prior.shape[1]
    slot = torch.arange(count, device=p.q.device)
    position = torch.arange(p.offset, p.offset + queries, device=p.q.device)
    if p.documents is None:
        visible = (slot[:, None] <= position) if p.causal else slot[:, None].expand(-1, queries) >= 0
        return [_Block(slice(0, queries), None, visible[None, None, None])], None
    number = torch.zeros_like(p.documents[..., 0])
    number[:, 1:] = (p.documents[:, 1:] != p.documents[:, :-1]).any(-1).cumsum(1)  # [B, M]
    start, stop = p.documents.unbind(-1)
    last = torch.minimum(stop, position + 1) if p.causal else stop
    most = int(number.max()) + 1 if number.numel() else 0
    first = number.new_zeros(len(number), most).scatter_(1, number, start)
    blocks = []
    for row in range(0, queries, ROWS):
        rows = slice(row, min(row + ROWS, queries))
        lowest = number[:, row : row + 1]
        several = int((number[:, rows] - lowest).max()) + 1 if len(number) else 0
        documents = lowest + torch.arange(several, device=p.q.device)  # [B, p]
        own = documents[:, :, None] == number[:, None, rows]  # [B, p, m]
        in_document = start[:, None, rows] + slot[:, None] < last[:, None, rows]  # [B, C, m]
        visible = (own.unsqueeze(2) & in_document.unsqueeze(1)).flatten(1, 2)
        blocks.append(_Block(rows, documents.clamp(max=most - 1), visible[:, None, None]))
    return blocks, first


def _of_documents(p: SinkProblem, x_BGNF: Tensor, first_BP: Tensor | None) -> Tensor:
    """Keys or values of the sinks of each document, `[B, G, P, C, F]`."""
    count = p.log_prior.shape[1]
    if first_BP is None:
        return x_BGNF[:, :, None, :count]
    index = (first_BP.unsqueeze(-1) + torch.arange(count, device=x_BGNF.device)).clamp(max=x_BGNF.shape[2] - 1)
    index = index.flatten(1)[:, None, :, None].expand(-1, x_BGNF.shape[1], -1, x_BGNF.shape[3])
    return x_BGNF.gather(2, index).unflatten(2, (-1, count))


def _of_block(x_BGPCF: Tensor, block: _Block) -> Tensor:
    """Those of the documents of a block, for all query heads of a key head: `[B, G, 1, x, F]`."""
    if block.documents is not None:
        _, kv_heads, _, *rest = x_BGPCF.shape
        index = block.documents[:, None, :, None, None].expand(-1, kv_heads, -1, *rest)
        x_BGPCF = x_BGPCF.gather(2, index)
    return x_BGPCF.flatten(2, 3).unsqueeze(2)


def _logits(p: SinkProblem, block: _Block, k_BGPCD: Tensor) -> Tensor:
    """`[B, G, R, x, m]`, −inf for what a query does not see. Few sinks are reduced fastest if they do not come last."""
    q = p.by_group(p.q[:, :, block.rows].to(p.dtype))
    content = _of_block(k_BGPCD.to(p.dtype) * p.softmax_scale, block) @ q.mT
    scale = None
    if p.query_scale is not None:
        scale = p.by_group(p.query_scale[:, :, block.rows].to(p.dtype)).unsqueeze(-2)
    prior = p.by_group(p.log_prior, 0).repeat(1, 1, content.shape[-2] // p.log_prior.shape[1])
    return masked_logits(content, prior.unsqueeze(-1), block.visible, scale, p.scale_prior)


def _attend_to_finite(p: SinkProblem, blocks: list[_Block], first_BP: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v = (_of_documents(p, x, first_BP) for x in (p.k, p.v))
    outs, lses = [], []
    for block in blocks:
        logits = _logits(p, block, k)
        nothing = logits.detach().amax(-2, keepdim=True).isneginf()
        logits = logits.masked_fill(nothing, 0.0)  # their softmax and its gradient would be NaN
        posterior = logits.softmax(-2).masked_fill(nothing, 0.0)
        outs.append((posterior.mT @ _of_block(v.to(p.dtype), block)).flatten(1, 2))
        lses.append(logits.logsumexp(-2).masked_fill(nothing.squeeze(-2), -torch.inf).flatten(1, 2))
    if not outs:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1], dtype=p.dtype), p.q.new_zeros(p.q.shape[:3], dtype=p.dtype)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))


def _without_broken(p: SinkProblem, blocks: list[_Block], first_BP: Tensor | None) -> tuple[SinkProblem, Tensor]:
    """The problem with zeros for entries that are not finite, and which queries have or see one, `[B, H, M]`."""
    broken_keys = ~(p.k.isfinite().all(-1, keepdim=True) & p.v.isfinite().all(-1, keepdim=True))
    broken_queries = ~p.q.isfinite().all(-1)
    p = replace(
        p, q=p.q.masked_fill(~p.q.isfinite(), 0.0), k=p.k.masked_fill(broken_keys, 0.0),
        v=p.v.masked_fill(broken_keys, 0.0),
    )  # fmt: skip
    k, broken_sinks = (_of_documents(p, x, first_BP) for x in (p.k, broken_keys))
    broken = []
    for block in blocks:
        seen = ~_logits(p, block, k).isneginf()
        sees_broken = (seen & _of_block(broken_sinks, block)).any(-2).flatten(1, 2)
        broken.append(sees_broken | (broken_queries[:, :, block.rows] & seen.any(-2).flatten(1, 2)))
    return p, torch.cat(broken, 2) if broken else broken_queries


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor log_prior, Tensor? query_scale, Tensor? documents"
_SETTINGS = "float softmax_scale, bool scale_prior, bool causal, SymInt offset"


def _tensors(p: SinkProblem) -> list[Tensor | None]:
    return [p.q, p.k, p.v, p.log_prior, p.query_scale, p.documents]


@torch.library.custom_op(
    "bayesattn::attend_to_sinks", mutates_args=(), schema=f"({_TENSORS}, *, {_SETTINGS}) -> (Tensor out, Tensor lse)"
)
def _attend(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    p = SinkProblem(*tensors, **settings)
    blocks, first = _blocks(p)
    with without_autocast(p.q):
        out, lse = _attend_to_finite(p, blocks, first)
        if not can_check(p.q) or (bool((lse < torch.inf).all()) and all_finite(_of_documents(p, p.v, first))):
            return out, lse
        p, broken = _without_broken(p, blocks, first)
        out, lse = _attend_to_finite(p, blocks, first)
    if not (lse < torch.inf).all():
        raise NotFiniteError(
            "logits of sinks are too large to compute; at most 1e29 is allowed, make queries, keys or scales smaller"
        )
    return out.masked_fill_(broken.unsqueeze(-1), torch.nan), lse.masked_fill_(broken, torch.nan)


@_attend.register_fake
def _(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    p = SinkProblem(*tensors, **settings)
    shape = p.q.shape[:3]
    return p.q.new_empty(*shape, p.v.shape[-1], dtype=p.dtype), p.q.new_empty(shape, dtype=p.dtype)


@torch.library.custom_op(
    "bayesattn::attend_to_sinks_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, {_TENSORS}, *, {_SETTINGS}) "
    f"-> ({', '.join(f'Tensor d{name}' for name in LEARNED)})",
)
def _attend_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    p = SinkProblem(*tensors, **settings)
    blocks, first = _blocks(p)
    with without_autocast(p.q):
        if can_check(p.q) and not all(map(all_finite, (p.q, p.k, p.v))):
            p, broken = _without_broken(p, blocks, first)
            grad_out = grad_out.masked_fill(broken.unsqueeze(-1) & (grad_out != 0), torch.nan)
            grad_lse = grad_lse.masked_fill(broken & (grad_lse != 0), torch.nan)
        inputs = {name: getattr(p, name) for name in LEARNED if getattr(p, name) is not None}

        def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
            changed: dict[str, Any] = dict(zip(inputs, given, strict=True))
            return _attend_to_finite(replace(p, **changed), blocks, first)

        pull_back = torch.func.vjp(attend, *inputs.values())[1]
        gradients = dict(zip(inputs, pull_back((grad_out, grad_lse)), strict=True))
    # An operator returns tensors: an empty one stands for what there is not.
    return tuple(gradients[name].contiguous() if name in gradients else p.q.new_empty(0) for name in LEARNED)


@_attend_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    p = SinkProblem(*tensors, **settings)
    inputs = (getattr(p, name) for name in LEARNED)
    return tuple(p.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.settings = {name: keyword_only_inputs[name] for name in SETTINGS}


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = apply_operator(_AttendBackward, ctx.settings, grad_out, grad_lse, *tensors)
    by_name = dict(zip(LEARNED, gradients, strict=True))
    if tensors[4] is None:
        by_name["query_scale"] = None
    return (*(by_name[name] for name in LEARNED), None)


_attend.register_autograd(_differentiate, setup_context=_save)


class _Attend(Operator):
    @staticmethod
    def forward(settings: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _attend(*tensors, **settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs[1:], inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_differentiate(ctx, *grads)


class _AttendBackward(Operator):
    @staticmethod
    def forward(settings: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _attend_backward(*tensors, **settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to keep: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError("attention has no second derivatives; use implementation='reference', which has them")
