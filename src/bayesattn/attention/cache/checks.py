"""Validation of what a cache is given: each error names what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesattn.attention.inputs import FARTHEST, all_finite, can_check, check_given, check_inputs, check_tensor
from bayesattn.attention.problem import MOST_COUNTED
from bayesattn.errors import NotFiniteError, check_flags, is_number, is_whole, shown
from bayesattn.priors.base import Prior
from bayesattn.priors.conditioned import ConditionedPrior, GivenPrior
from bayesattn.priors.sinks import Sinks

CHANGED = "the prior or the query scale changed since the cache was filled; reset it"
INDEX_DTYPES = (torch.int64, torch.int32)


def check_settings(
    prior: object, query_scale: object, content_spread: object, rollback: object, **flags: object
) -> None:
    """Raise an error for settings of a cache that no layer can have."""
    if not isinstance(prior, Prior | ConditionedPrior | Sinks):
        raise TypeError(
            f"prior is a {type(prior).__name__}; a cache needs the layer's Prior, ConditionedPrior or Sinks"
        )
    if query_scale is not None and not callable(query_scale):
        raise TypeError(f"query_scale is a {type(query_scale).__name__}; a module, a function or None is allowed")
    check_flags(**flags)
    if isinstance(prior, Sinks) and flags.get("same_positions"):
        raise ValueError("same_positions is for `update`, which cannot say that keys are sinks; use attend instead")
    if content_spread is not None and not (is_number(content_spread) and content_spread >= 0.0):  # type: ignore[operator]
        raise ValueError(f"content_spread is {shown(content_spread)}; it must be a number of nats, at least 0")
    if not is_whole(rollback, 0, FARTHEST):
        raise ValueError(f"rollback is {shown(rollback)}; it must be a number of tokens, at least 0")


def check_reserve(length: object) -> None:
    """Raise an error unless it is a number of positions."""
    if not is_whole(length, 0, MOST_COUNTED):
        raise ValueError(f"length is {shown(length)}; a whole number of positions from 0 to {MOST_COUNTED:,} is needed")


def check_padding(padding: object) -> Tensor:
    """One number of positions per sequence as a tensor, or an error."""
    needed = "one number of positions, at least 0, per sequence is needed"
    try:
        counts = torch.as_tensor(padding)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"padding is {shown(padding)}; {needed}") from None
    whole = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    if not whole or counts.dim() != 1 or not len(counts):
        raise ValueError(f"padding is {shown(padding)}; {needed}")
    if counts.min() < 0 or counts.max() > FARTHEST:
        raise ValueError(f"padding is {shown(counts.tolist())}; {needed}, up to 2**53")
    return counts.long()


def check_index(index: object, sequences: int | None) -> Tensor:
    """An index of `sequences` sequences, of any number if that is None, as a tensor of int64, or an error."""
    if not isinstance(index, Tensor) or index.dtype not in INDEX_DTYPES:
        given = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index is {given}; a tensor of integers, int64 for example, is needed")
    if index.dim() != 1 or not len(index):
        raise ValueError(f"index has shape {list(index.shape)}; one sequence or more, [n], is needed")
    if sequences is not None and (index.min() < 0 or index.max() >= sequences):
        raise ValueError(
            f"index reaches from {int(index.min())} to {int(index.max())}; the cache has {sequences} sequences, "
            "counted from 0"
        )
    return index.long()


def check_new_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error if q, k and v are not those of new tokens, of which q may have the last alone."""
    check_inputs(q, k, v)
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}; queries are of the new tokens only")


def kind_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...] | None:
    """All that decides whether the checks of shapes and dtypes pass; None for what is not worth a comparison."""
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor) or q.is_nested or k.is_nested or v.is_nested:
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout, q.device, k.device, v.device
    )  # fmt: skip


def check_keys_and_values(k: Tensor, v: Tensor) -> None:
    """Raise an error if the types, shapes, dtypes or devices of k and v do not fit. Values may have no entries."""
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
    if v.dtype != k.dtype or v.device != k.device:
        raise ValueError(f"v is {v.dtype} on {v.device} and k is {k.dtype} on {k.device}; they must agree")
    if k.shape[:3] != v.shape[:3] or 0 in (k.shape[1], k.shape[3]):
        raise ValueError(
            f"k has shape {list(k.shape)} and v {list(v.shape)}; batch, heads and tokens must agree, and heads and "
            "head size be at least 1"
        )


def given_prior(prior: Prior | ConditionedPrior, parameters: object, q: Tensor) -> GivenPrior | None:
    """The conditioned prior of the queries with these parameters, None for a static one, or an error."""
    if isinstance(prior, Prior):
        if parameters is not None:
            name = type(prior).__name__
            raise TypeError(f"{name} does not depend on the query; attend takes no parameters with it")
        return None
    name = type(prior).__name__
    if parameters is None and q.shape[2] == 0:
        return None
    if not isinstance(parameters, Tensor):
        raise TypeError(
            f"{name} depends on the query; attend needs parameters=prior(states) of the queries and got "
            f"{shown(parameters)}"
        )
    given = prior.with_parameters(parameters)
    check_given(given, q)
    return given


def check_heads(prior: Prior | ConditionedPrior | Sinks, k: Tensor, query_heads: int) -> None:
    """Raise an error if the prior, the queries and the keys have numbers of heads that do not fit."""
    if query_heads != prior.num_heads or prior.num_heads % k.shape[1]:
        raise ValueError(
            f"the prior has {prior.num_heads} heads, q {query_heads} and k {k.shape[1]}; the first two must "
            "be equal and the last divide them"
        )


def check_position(position: object, length: int) -> None:
    """Raise an error unless new tokens at this position follow those that a cache of this length has."""
    if position is None:
        return
    if not is_whole(position, 0, FARTHEST):
        raise ValueError(f"position is {shown(position)}; a whole number, here {length}, or None is needed")
    if position != length:
        raise ValueError(
            f"the new tokens start at position {position:,} and the cache has {length:,} positions; "
            "they must follow those (crop takes positions back)"
        )


def check_like_held(k: Tensor, v: Tensor, held: Tensor, shapes: tuple[list[int], list[int]]) -> None:
    """Raise an error for keys and values of other sizes than those held, of which `held` is an example."""
    if len(k) != len(held) or k.dtype != held.dtype or k.device != held.device:
        raise ValueError(
            f"the cache holds {len(held)} sequences of {held.dtype} on {held.device} and the new tokens are "
            f"{len(k)} of {k.dtype} on {k.device}; they must agree"
        )
    given = [[*x.shape[:2], x.shape[3]] for x in (k, v)]
    if given != list(shapes):
        raise ValueError(
            f"k has [batch, heads, size] {given[0]} and v {given[1]}, and the cache holds {shapes[0]} and {shapes[1]}; "
            "they must agree"
        )


def check_finite(name: str, x: Tensor) -> None:
    """Raise an error for NaN and infinite entries."""
    if can_check(x) and not all_finite(x):
        raise NotFiniteError(f"{name} has NaN or infinite entries; only finite numbers are allowed, except in padding")


def check_values(v: Tensor) -> float:
    """The largest |v|, or an error for NaN and infinite entries; infinity where values are not looked at."""
    if not can_check(v) or not v.numel():
        return math.inf
    least, most = torch.stack(v.aminmax()).tolist()
    largest: float = max(-least, most)
    if not largest < math.inf:
        check_finite("v", v)
    return largest


class Snapshot:
    """The values of modules' parameters and buffers, to see whether they change.

    Elsewhere than on the CPU the host would have to wait for the values. There a change is seen only if autograd counts
    it, which writes through `.data` and in inference mode escape.
    """

    def __init__(self, *modules: object) -> None:
        self.values = [x.detach().clone() for x in _tensors(modules)]
        self.versions = [_version(x) for x in _tensors(modules)]

    def shows(self, *modules: object) -> bool:
        """Whether these are the modules' values now."""
        tensors = _tensors(modules)
        return len(tensors) == len(self.values) and all(map(_is_same, tensors, self.values, self.versions))

    def count_again(self, *modules: object) -> None:
        """For modules that were loaded with the snapshot: autograd counts from 0 again, the values are the same."""
        tensors = _tensors(modules)
        if all(torch.equal(x, value) for x, value in zip(tensors, self.values, strict=True)):
            self.versions = [_version(x) for x in tensors]


def _tensors(modules: Sequence[object]) -> list[Tensor]:
    """Their parameters and buffers. `parameters()` would take longer than the rest of the checks of a token."""
    parts = {id(m): m for m in modules if isinstance(m, nn.Module)}
    waiting, tensors = list(parts.values()), []
    while waiting:
        part = waiting.pop()
        tensors += [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        for child in part._modules.values():
            if child is not None and id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return tensors


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _is_same(x: Tensor, value: Tensor, version: int) -> bool:
    if x.dtype != value.dtype or x.device != value.device:
        return False
    return torch.equal(x, value) if x.is_cpu else x.shape == value.shape and _version(x) == version
