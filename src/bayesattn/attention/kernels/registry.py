"""The kernels there are, and the one operator through which all of them become differentiable and compilable.

A kernel is a function from a `Problem` to the output. It need not be differentiable: the operator's backward pass is
blockwise's, which works from the problem alone. As a registered operator it is opaque to `torch.compile`, whatever
loops it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention.kernels import blockwise, flex, reference, sdpa
from bayesattn.attention.kernels.blockwise import Gradients
from bayesattn.attention.problem import FIELD_TYPES, SETTING_FIELDS, TENSOR_FIELDS, Problem


def _no_obstacle(problem: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A way to compute the posterior.

    `forward(problem)` returns `[B, H, M, E]` in the dtype of q, contiguous. `obstacle(problem)` says in half a sentence
    what the kernel cannot do, or is None. With `differentiable`, autograd goes through `forward` itself.
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
        with without_autocast(problem.q):
            return kernel.forward(problem)
    return _attend(*problem.tensors(), **problem.settings(), kernel=name)


def without_autocast(like: Tensor) -> torch.autocast:
    """Kernels choose their precision themselves; autocast would round the log-prior as well."""
    return torch.autocast(like.device.type, enabled=False)


def _fastest(problem: Problem) -> str:
    if flex.pays(problem):
        return "flex"
    return "blockwise" if sdpa.obstacle(problem) else "sdpa"


# The operators take a problem's tensors by position, which lets them have gradients, and its settings by keyword.
_SCHEMA_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool", "int": "SymInt"}


def _declare(names: Sequence[str]) -> str:
    return ", ".join(f"{_SCHEMA_TYPES[FIELD_TYPES[name]]} {name}" for name in names)


_TENSORS, _SETTINGS = _declare(TENSOR_FIELDS), _declare(SETTING_FIELDS)


@torch.library.custom_op(
    "bayesattn::attend", mutates_args=(), schema=f"({_TENSORS}, *, {_SETTINGS}, str kernel) -> Tensor"
)
def _attend(*tensors: Tensor | None, kernel: str, **settings: Any) -> Tensor:
    problem = Problem.of(tensors, settings)
    with without_autocast(problem.q):
        return _KERNELS[kernel].forward(problem)


@_attend.register_fake
def _(*tensors: Tensor | None, kernel: str, **settings: Any) -> Tensor:
    problem = Problem.of(tensors, settings)
    return problem.q.new_empty(*problem.q.shape[:3], problem.v.shape[-1])


@torch.library.custom_op(
    "bayesattn::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {_TENSORS}, *, {_SETTINGS}, bool needs_prior, bool needs_scale) "
    f"-> ({', '.join(f'Tensor d{name}' for name in Gradients._fields)})",
)
def _attend_backward(
    grad_out: Tensor, *tensors: Tensor | None, needs_prior: bool, needs_scale: bool, **settings: Any
) -> tuple[Tensor, ...]:
    problem = Problem.of(tensors, settings)
    with without_autocast(problem.q):
        gradients = blockwise.backward(problem, grad_out, needs_prior, needs_scale)
    # An operator returns tensors: an empty one stands for a gradient that is not needed.
    return tuple(problem.q.new_empty(0) if gradient is None else gradient for gradient in gradients)


@_attend_backward.register_fake
def _(
    grad_out: Tensor, *tensors: Tensor | None, needs_prior: bool, needs_scale: bool, **settings: Any
) -> tuple[Tensor, ...]:
    problem = Problem.of(tensors, settings)
    needed = {"log_prior": needs_prior, "query_scale": needs_scale}
    inputs = [getattr(problem, name) if needed.get(name, True) else None for name in Gradients._fields]
    return tuple(problem.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.settings = {name: keyword_only_inputs[name] for name in SETTING_FIELDS}


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    needs = dict(zip(TENSOR_FIELDS, ctx.needs_input_grad, strict=True))
    gradients = _attend_backward(
        grad_out,
        *ctx.saved_tensors,
        **ctx.settings,
        needs_prior=needs["log_prior"],
        needs_scale=needs["query_scale"],
    )
    by_name = dict(zip(Gradients._fields, gradients, strict=True))
    return tuple(by_name[name] if needs[name] else None for name in TENSOR_FIELDS)


_attend.register_autograd(_differentiate, setup_context=_save_inputs)
