"""The kernels there are, and the one operator through which all of them become differentiable and compilable.

A kernel is a function from a `Problem` to a `Solution`. It need not be differentiable: the operator's backward pass is
blockwise's, which works from the problem alone. As a registered operator it is opaque to `torch.compile`, whatever
loops it runs.

Reverse mode is two operators, each behind an `autograd.Function`: a formula registered with the operator would neither
serve `torch.func` nor say that there are no second derivatives. Under `torch.vmap` they loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bayesattn.attention.inputs import all_finite, can_check
from bayesattn.attention.kernels import blockwise, flex, reference, sdpa
from bayesattn.attention.kernels.blockwise import Gradients, Needed
from bayesattn.attention.kernels.finite import isolate, sees_every_key
from bayesattn.attention.plan import DEFAULT_LIMITS as PLAN_LIMITS
from bayesattn.attention.problem import FIELD_TYPES, SETTING_FIELDS, TENSOR_FIELDS, Problem, Solution
from bayesattn.attention.transforms import in_forward_mode, in_torch_func
from bayesattn.errors import NotFiniteError, shown
from bayesattn.priors.conditioned import find_family

HAS_ALL_DERIVATIVES = "use implementation='reference', which has them"


def _no_obstacle(problem: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A way to compute the posterior.

    `forward(problem)` returns a `Solution`. `obstacle(problem)` says in half a sentence what the kernel cannot do, or
    is None. With `differentiable`, autograd goes through `forward` itself. With `conditioned`, it adds the rows of a
    prior that depends on the query; others are never given such a problem.
    """

    forward: Callable[[Problem], Solution]
    obstacle: Callable[[Problem], str | None] = _no_obstacle
    differentiable: bool = False
    conditioned: bool = False


_KERNELS: dict[str, Kernel] = {
    "reference": Kernel(reference.forward, differentiable=True, conditioned=True),
    "blockwise": Kernel(blockwise.forward, conditioned=True),
    "sdpa": Kernel(sdpa.forward, sdpa.obstacle, conditioned=True),
    "flex": Kernel(flex.forward, flex.obstacle, differentiable=True),
}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make `kernel` available as `implementation=name`."""
    if not isinstance(name, str) or not isinstance(kernel, Kernel):
        raise TypeError(f"register_kernel got {shown(name)} and {shown(kernel)}; a name and a Kernel are needed")
    if name == "auto" or name in _KERNELS:
        raise ValueError(f"the implementation name {shown(name)} is taken; choose another")
    _KERNELS[name] = kernel


def solve(problem: Problem, implementation: str) -> Solution:
    """Compute the problem with the named kernel; `auto` takes the fastest that can."""
    if not isinstance(implementation, str) or implementation not in ("auto", *_KERNELS):
        raise ValueError(f"implementation is {shown(implementation)}; allowed are {', '.join(['auto', *_KERNELS])}")
    keeps_posterior = _keeps_posterior(problem)
    name = _fastest(problem, keeps_posterior) if implementation == "auto" else implementation
    if keeps_posterior and name == "blockwise":
        problem = replace(problem, needs_posterior=True)
    kernel = _KERNELS[name]
    obstacle = kernel.obstacle(problem)
    if problem.parameters is not None and not kernel.conditioned:
        obstacle = "has no priors that depend on the query"
    if obstacle:
        raise ValueError(f"implementation {name!r} {obstacle}; use 'blockwise', which can, or 'auto'")
    if kernel.differentiable:
        return _run(name, problem)
    if in_forward_mode():
        raise RuntimeError(f"implementation {name!r} has no forward-mode derivatives; {HAS_ALL_DERIVATIVES}")
    out, lse, _ = apply_operator(_Attend, {**problem.settings(), "kernel": name}, *problem.tensors())
    return Solution(out, lse if problem.needs_lse else None)


def _run(name: str, problem: Problem) -> Solution:
    """The kernel's solution, with NaN for the queries that see something that is not finite, and for no others."""
    with without_autocast(problem.q):
        if sees_every_key(problem):
            solution = _forward(name, problem)
            if all_finite(solution.out):
                return solution
        problem, broken = isolate(problem)
        out, lse, posterior = _forward(name, problem)
    if broken is None and problem.parameters is not None and can_check(out) and not all_finite(out):
        raise NotFiniteError(
            f"attention under {find_family(problem.family).__name__} is not finite; its rows must be finite numbers at "
            "every distance, negative ones too"
        )
    if broken is not None:
        out = out.masked_fill(broken.unsqueeze(-1), torch.nan)
        lse = None if lse is None else lse.masked_fill(broken, torch.nan)
    return Solution(out, lse, posterior)


def _forward(name: str, problem: Problem) -> Solution:
    solution = _KERNELS[name].forward(problem)
    if not isinstance(solution, Solution):
        raise TypeError(f"the kernel {name!r} returned a {type(solution).__name__}; a Solution is needed")
    return solution


def without_autocast(like: Tensor) -> torch.autocast:
    """Kernels choose their precision themselves; autocast would round the log-prior as well."""
    return torch.autocast(like.device.type, enabled=False)


def _keeps_posterior(problem: Problem) -> bool:
    """Whether blockwise is to keep the posterior for a backward pass."""
    if torch.compiler.is_exporting():  # an exported program is for any length
        return False
    if problem.num_queries < 2 or blockwise.num_logits(problem) > blockwise.MOST_KEPT_LOGITS:
        return False
    needs_gradient = any(x is not None and x.requires_grad for x in problem.tensors())
    # Under `torch.vmap` each slice would keep one.
    return torch.is_grad_enabled() and needs_gradient and (torch.compiler.is_compiling() or not in_torch_func())


def _fastest(problem: Problem, keeps_posterior: bool) -> str:
    if flex.pays(problem) and problem.parameters is None:
        return "flex"
    if keeps_posterior:
        return "blockwise"
    # Writing a scaled bias for the fused kernel takes longer than its lead, except where a plan leaves out much.
    is_written = problem.query_scale is not None and problem.scale_prior
    is_planned = not torch.compiler.is_exporting() and problem.num_queries >= PLAN_LIMITS.least_queries
    return "blockwise" if sdpa.obstacle(problem) or (is_written and not is_planned) else "sdpa"


# The operators take a problem's tensors by position, which lets them have gradients, and its settings by keyword.
_SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool", "int": "SymInt", "str": "str"
}  # fmt: skip


def _declare(names: Sequence[str]) -> str:
    return ", ".join(f"{_SCHEMA_TYPES[FIELD_TYPES[name]]} {name}" for name in names)


_TENSORS, _SETTINGS = f"{_declare(TENSOR_FIELDS)}, Tensor[] shared", _declare(SETTING_FIELDS)
_NEEDED = ", ".join(f"bool needs_{name}" for name in Needed._fields)
_GRADIENTS = [name for name in Gradients._fields if name != "shared"]


def flat(tensors: Sequence[Any]) -> list[Tensor | None]:
    """A problem's tensors, of which an operator has the shared ones as a list, one after the other."""
    return [*tensors[:-1], *tensors[-1]]


def nested(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The same as an operator takes them."""
    return *tensors[: len(TENSOR_FIELDS)], list(tensors[len(TENSOR_FIELDS) :])


@torch.library.custom_op(
    "bayesattn::attend",
    mutates_args=(),
    schema=f"({_TENSORS}, *, {_SETTINGS}, str kernel) -> (Tensor out, Tensor lse, Tensor posterior)",
)
def _attend(*tensors: Any, kernel: str, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem.of(flat(tensors), settings)
    out, lse, posterior = _run(kernel, problem)
    # An operator returns tensors: an empty one stands for what is not needed.
    return (
        out,
        lse if problem.needs_lse and lse is not None else problem.q.new_empty(0),
        posterior if problem.needs_posterior and posterior is not None else problem.q.new_empty(0),
    )


@_attend.register_fake
def _(*tensors: Any, kernel: str, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem.of(flat(tensors), settings)
    shape = problem.q.shape[:3]
    lse = problem.q.new_empty(shape, dtype=problem.dtype) if problem.needs_lse else problem.q.new_empty(0)
    size = blockwise.num_logits(problem) if problem.needs_posterior else 0
    posterior = problem.q.new_empty(size, dtype=problem.dtype if size else problem.q.dtype)
    return problem.q.new_empty(*shape, problem.v.shape[-1]), lse, posterior


@torch.library.custom_op(
    "bayesattn::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor? posterior, {_TENSORS}, *, {_SETTINGS}, {_NEEDED}) "
    f"-> ({', '.join(f'Tensor d{name}' for name in _GRADIENTS)}, Tensor[] dshared)",
)
def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor | None, posterior: Tensor | None, *tensors: Any, **settings: Any
) -> tuple[Any, ...]:
    needed = _take_needed(settings)
    problem, broken = Problem.of(flat(tensors), settings), None
    if not sees_every_key(problem):
        problem, broken = isolate(problem)
    if broken is not None:
        grad_out = grad_out.masked_fill(broken.unsqueeze(-1) & (grad_out != 0), torch.nan)
    with without_autocast(problem.q):
        *gradients, shared = blockwise.backward(problem, grad_out, grad_lse, needed, kept=posterior)
    return *(problem.q.new_empty(0) if gradient is None else gradient for gradient in gradients), list(shared)


@_attend_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, posterior: Tensor | None, *tensors: Any, **settings: Any
) -> tuple[Any, ...]:
    needed = _take_needed(settings)
    problem = Problem.of(flat(tensors), settings)
    is_needed = {"log_prior": needed.prior, "query_scale": needed.scale, "parameters": needed.rows}
    inputs = [getattr(problem, name) if is_needed.get(name, True) else None for name in _GRADIENTS]
    shared = [x.new_empty(x.shape) for x in problem.shared] if needed.rows else []
    return *(problem.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs), shared


def _take_needed(settings: dict[str, Any]) -> Needed:
    return Needed(*(settings.pop(f"needs_{name}") for name in Needed._fields))


def _save(ctx: Any, tensors: Sequence[Tensor | None], settings: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(output[2], *tensors)
    ctx.settings = {name: settings[name] for name in SETTING_FIELDS}
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, needs: Sequence[bool], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of a problem's tensors, in their order; `needs` says which are needed."""
    posterior, *tensors = ctx.saved_tensors
    if grad_out is None:
        q, _, v = tensors[:3]
        grad_out = q.new_zeros(*q.shape[:3], v.shape[-1])
    by_name = dict(zip(TENSOR_FIELDS, needs, strict=False))
    needed = Needed(by_name["log_prior"], by_name["query_scale"], any(needs[TENSOR_FIELDS.index("parameters") :]))
    settings = {**ctx.settings, **{f"needs_{name}": value for name, value in needed._asdict().items()}}
    grad_lse = grad_lse if settings["needs_lse"] else None
    posterior = posterior if settings["needs_posterior"] else None
    gradients = apply_operator(_AttendBackward, settings, grad_out, grad_lse, posterior, *tensors)
    of_inputs = dict(zip(_GRADIENTS, gradients, strict=False))
    of_tensors = [of_inputs.get(name) for name in TENSOR_FIELDS]
    of_shared = gradients[len(_GRADIENTS) :] or [None] * (len(tensors) - len(TENSOR_FIELDS))
    return tuple(x if need else None for x, need in zip([*of_tensors, *of_shared], needs, strict=True))


def _save_of_operator(ctx: Any, inputs: Sequence[Any], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _save(ctx, flat(inputs), keyword_only_inputs, output)


def _differentiate_operator(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Any, ...]:
    return nested(_differentiate(ctx, [bool(each) for each in flat(ctx.needs_input_grad)], grad_out, grad_lse))


_attend.register_autograd(_differentiate_operator, setup_context=_save_of_operator)


class Operator(Function):
    """An operator of keyword settings and tensors, for all transforms of `torch.func` but forward mode."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, settings: dict[str, Any], *tensors: Any) -> Any:
        """One call for each slice, stacked."""
        if info.batch_size == 0:
            raise RuntimeError(f"torch.vmap has no slices; at least one is needed, or {HAS_ALL_DERIVATIVES}")
        results = []
        for i in range(info.batch_size):
            dims = zip(tensors, in_dims[1:], strict=True)
            results.append(cls.apply(settings, *(x if dim is None else x.select(dim, i) for x, dim in dims)))
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


class _Attend(Operator):
    @staticmethod
    def forward(settings: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _attend(*nested(tensors), **settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs[1:], inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:
        return None, *_differentiate(ctx, ctx.needs_input_grad[1:], grad_out, grad_lse)


class _AttendBackward(Operator):
    @staticmethod
    def forward(settings: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        grads, inputs = tensors[:3], tensors[3:]
        *gradients, shared = _attend_backward(*grads, *nested(inputs), **settings)
        return *gradients, *shared

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to keep: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(f"attention has no second derivatives; {HAS_ALL_DERIVATIVES}")


def apply_operator(function: type[Operator], settings: dict[str, Any], *tensors: Tensor | None) -> Any:
    """Call the operator, through its `Function` where a derivative or a transform may need that.

    While compiling it is called directly, because `torch.compile` does not follow every `Function`.
    """
    call = function.apply if not torch.compiler.is_compiling() and _may_transform(tensors) else function.forward
    return call(settings, *tensors)


def _may_transform(tensors: Sequence[Tensor | None]) -> bool:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return True
    return in_torch_func()
