"""The kernels there are, and the one operator through which all of them become differentiable and compilable.

A kernel is a function from a `Problem` to the output. It need not be differentiable: the operator's backward pass is
blockwise's, which works from the problem alone. As a registered operator it is opaque to `torch.compile`, whatever
loops it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention import blockwise, flex, reference, sdpa
from bayesattn.attention.problem import Problem


def _no_obstacle(problem: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A way to compute the posterior.

    `forward(problem)` returns `[B, H, M, E]` in the dtype of q, contiguous. `obstacle(problem)` says in half a sentence
    what the kernel cannot do, or None. With `differentiable`, autograd goes through `forward` itself.
    """

    forward: Callable[[Problem], Tensor]
    obstacle: Callable[[Problem], str | None] = _no_obstacle
    differentiable: bool = False


_KERNELS: dict[str, Kernel] = {
    "reference": Kernel(reference.forward, differentiable=True),
    "blockwise": Kernel(blockwise.forward),
    "sdpa": Kernel(sdpa.forward, sdpa.obstacle),
    "flex": Kernel(flex.forward, flex.obstacle, differentiable=True),
}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make `kernel` available as `implementation=name`."""
    if name == "auto" or name in _KERNELS:
        raise ValueError(f"the implementation name {name!r} is taken; choose another")
    _KERNELS[name] = kernel


def solve(problem: Problem, implementation: str) -> Tensor:
    """Compute the problem with the named kernel; `auto` takes the fastest that can."""
    name = _fastest(problem) if implementation == "auto" else implementation
    if name not in _KERNELS:
        raise ValueError(f"implementation is {name!r}; allowed are {', '.join(['auto', *_KERNELS])}")
    kernel = _KERNELS[name]
    if obstacle := kernel.obstacle(problem):
        raise ValueError(f"implementation {name!r} {obstacle}; use 'blockwise', which can, or 'auto'")
    if kernel.differentiable:
        with _no_autocast(problem.q):
            return kernel.forward(problem)
    p = problem
    return _attend(
        p.q, p.k, p.v, p.log_prior, p.query_scale, p.documents,
        p.softmax_scale, p.scale_prior, p.causal, p.offset, p.tolerance, name,
    )  # fmt: skip


def _no_autocast(like: Tensor) -> torch.autocast:
    """Kernels choose their precisions themselves; autocast would round the log-prior with everything else."""
    return torch.autocast(like.device.type, enabled=False)


def _fastest(problem: Problem) -> str:
    if flex.pays(problem):
        return "flex"
    return "blockwise" if sdpa.obstacle(problem) else "sdpa"


@torch.library.custom_op("bayesattn::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: Tensor,
    query_scale: Tensor | None,
    documents: Tensor | None,
    softmax_scale: float,
    scale_prior: bool,
    causal: bool,
    offset: int,
    tolerance: float,
    kernel: str,
) -> Tensor:
    problem = Problem(q, k, v, log_prior, query_scale, documents, softmax_scale, scale_prior, causal, offset, tolerance)
    with _no_autocast(q):
        return _KERNELS[kernel].forward(problem)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("bayesattn::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: Tensor,
    query_scale: Tensor | None,
    documents: Tensor | None,
    softmax_scale: float,
    scale_prior: bool,
    causal: bool,
    offset: int,
    tolerance: float,
    grad_out: Tensor,
    needs_prior: bool,
    needs_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(q, k, v, log_prior, query_scale, documents, softmax_scale, scale_prior, causal, offset, tolerance)
    with _no_autocast(q):
        dq, dk, dv, dprior, dscale = blockwise.backward(problem, grad_out, needs_prior, needs_scale)
    # An operator returns tensors: an empty one stands for a gradient nobody asked for.
    empty = q.new_empty(0)
    return dq, dk, dv, empty if dprior is None else dprior, empty.clone() if dscale is None else dscale


@_attend_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_prior: Tensor, query_scale: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    needs_prior, needs_scale = rest[-2:]
    needs_scale = needs_scale and query_scale is not None
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        log_prior.new_empty(log_prior.shape) if needs_prior else q.new_empty(0),
        query_scale.new_empty(query_scale.shape) if needs_scale else q.new_empty(0),  # type: ignore[union-attr]
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:11]


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    needs_prior, needs_scale = ctx.needs_input_grad[3:5]
    dq, dk, dv, dprior, dscale = _attend_backward(*ctx.saved_tensors, *ctx.settings, grad_out, needs_prior, needs_scale)
    return dq, dk, dv, dprior if needs_prior else None, dscale if needs_scale else None, *[None] * 7


_attend.register_autograd(_differentiate, setup_context=_remember)
