"""The priors of the study, each with random inputs, and the error of its attention against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.studies.bench.attention.measure import HEADS, SIZE
from bayesattn.studies.bench.inputs import CHECKED_QUERIES, LARGEST_ERROR, learned_prior

AnyPrior = ba.Prior | ba.ConditionedPrior | ba.Sinks
# Size of the hidden states that priors depend on.
WIDTH = HEADS * SIZE
RANK, SINKS = 16, 4
# FIRE counts distances against this length at first.
TRAINING_LENGTH = 512
# Errors of gradients below this share of the largest one are relative to that share. Some are zero but for rounding,
# such as that of a constant which is added to all log-priors of a head.
SMALLEST = 0.01


@dataclass(frozen=True)
class Kind:
    """How a prior is made, and what the study knows of its dense form.

    Args:
        make: the prior.
        given: what a query gives to it.
        matrices: numbers that dense autograd holds for each head, query and key, rounded up.
    """

    make: Callable[[], AnyPrior]
    given: Literal["states", "positions", "nothing"]
    matrices: int


STATIC = "GeneralizedGaussian"
PROFILES = f"ProfileBank, rank {RANK}"
PRIORS = {
    STATIC: Kind(lambda: learned_prior(HEADS), "nothing", 7),
    f"{STATIC}, {SINKS} sinks": Kind(lambda: ba.Sinks(learned_prior(HEADS), SINKS), "nothing", 11),
    PROFILES: Kind(lambda: ba.ProfileBank(HEADS, WIDTH, rank=RANK), "states", 9),
    f"{PROFILES}, {SINKS} sinks": Kind(lambda: ba.Sinks(ba.ProfileBank(HEADS, WIDTH, RANK), SINKS), "states", 13),
    "ConditionedGaussian": Kind(lambda: ba.ConditionedGaussian(HEADS, WIDTH), "states", 12),
    "Fire": Kind(lambda: ba.Fire(HEADS, TRAINING_LENGTH), "positions", 15),
}


class Error(NamedTuple):
    """The largest relative error, and what is allowed: twice that of plain float32, where that is large."""

    value: float
    allowed: float

    @property
    def is_too_large(self) -> bool:
        return not self.value <= self.allowed  # true for NaN as well


@dataclass(frozen=True)
class Case:
    """Random queries, keys and values, and a prior with what its queries are given, `[1, tokens, …]`.

    No weight vanishes, so nothing is pruned.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    prior: AnyPrior
    states: Tensor | None

    @staticmethod
    def make(name: str, tokens: int, seed: int = 0) -> Case:
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
        kind = PRIORS[name]
        states = {
            "states": lambda: torch.randn(1, tokens, WIDTH),
            "positions": lambda: torch.arange(tokens)[None],
            "nothing": lambda: None,
        }[kind.given]()
        return Case(q, k, v, kind.make(), states)

    def attend(self, implementation: str = "auto") -> Tensor:
        """Attention under the prior of each query."""
        given: Any = self.prior if self.states is None else self.prior.given(self.states)
        return ba.bayesian_attention(self.q, self.k, self.v, given, implementation=implementation)

    def training(self, implementation: str = "auto") -> Callable[[], object]:
        """Forward and backward: the gradients of all inputs and of all that the prior learns."""
        gradient, trainable = torch.randn_like(self.q), [*self._inputs(), *self.prior.parameters()]
        return lambda: torch.autograd.grad(self.attend(implementation), trainable, gradient, allow_unused=True)

    def error(self, gradients: bool) -> Error:
        """That of the last queries, and of the gradients of a loss on them, against float64."""
        last, inputs = slice(-CHECKED_QUERIES, None), self._inputs()
        states = None if self.states is None else self.states[:, last]
        some = replace(self, q=self.q[:, :, last], states=states)
        with torch.set_grad_enabled(gradients):
            exact = Case(
                some.q.double(), some.k.double(), some.v.double(), deepcopy(self.prior).double(),
                None if states is None else states.double(),
            )  # fmt: skip
            expected = _solution(exact.attend("reference"), [*inputs, *exact.prior.parameters()])
            plain = _solution(some.attend("reference"), [*inputs, *self.prior.parameters()])
            actual = _solution(self.attend()[:, :, last], [*inputs, *self.prior.parameters()])
        return Error(_largest_error(actual, expected), max(LARGEST_ERROR, 2 * _largest_error(plain, expected)))

    def _inputs(self) -> list[Tensor]:
        inputs = (self.q, self.k, self.v, self.states)
        return [x.requires_grad_() for x in inputs if x is not None and x.is_floating_point()]


def _solution(out: Tensor, trainable: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a random loss on it if it has any, in float64."""
    if not out.requires_grad:
        return [out.double()]
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, trainable, gradient.to(out.dtype), materialize_grads=True)
    return [x.double() for x in (out.detach(), *gradients)]


def _largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    floor = SMALLEST * max(float(x.norm()) for x in expected)
    errors = [float((a - b).norm()) / max(float(b.norm()), floor) for a, b in zip(actual, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.nan
