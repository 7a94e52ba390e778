"""Bad input of priors that depend on the query."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.bad_inputs.rows import Row, check_refused, rows

Tried = Callable[[str, int], None]
NAN, HUGE = math.nan, 10**400
Q = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 6, 8)
STATES, IDS = torch.randn(2, 6, 10), torch.arange(6)
GAUSSIAN, PROFILES, FIRE = ba.ConditionedGaussian(4, 10), ba.ProfileBank(4, 10, rank=3, extent=5), ba.Fire(4, 8)


class Odd(ba.ConditionedPrior):
    """Its shared tensors are those given, and its rows have another shape than is needed."""

    def __init__(self, *tensors: Any) -> None:
        super().__init__(4)
        self.tensors = tensors

    def forward(self, states: Tensor) -> Tensor:
        return states.new_zeros(1, 1, states.shape[1], 1)

    def shared(self) -> tuple[Tensor, ...]:
        return self.tensors

    @staticmethod
    def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        return torch.zeros(3)


def broken(prior: ba.ConditionedPrior) -> ba.ConditionedPrior:
    prior = deepcopy(prior)
    next(prior.parameters()).data.view(-1)[0] = NAN
    return prior


def given(family: Any, parameters: Any) -> ba.GivenPrior:
    return ba.GivenPrior(family, 4, parameters)


GIVE_STATES = "give prior.given(states) to attention, not the prior itself"
NOT_FINITE = "has parameters that are NaN or infinite"
FIRST_DIMENSION = "its first dimension must be 4, one entry a head, or 1"
# Of all functions of attention.
ATTENTION = [
    *rows("log_prior", (GAUSSIAN, GIVE_STATES), (PROFILES * ba.Window(4, 3), GIVE_STATES), (FIRE, GIVE_STATES)),
    *rows("log_prior", (GAUSSIAN.given(STATES[:, :5]), "the states of 5 queries and q has 6; they must agree")),
    *rows("log_prior", (GAUSSIAN.given(STATES[[0, 1, 0]]), "the states of 3 sequences and q has 2; they must agree")),
    *rows("log_prior", (FIRE.given(torch.arange(5)), "Fire was given the states of 5 queries and q has 6")),
    *rows("log_prior", (ba.ConditionedGaussian(3, 10).given(STATES), "ConditionedGaussian has 3 heads and q has 4")),
    *rows("log_prior", *((broken(p).given(STATES), NOT_FINITE) for p in (GAUSSIAN, PROFILES))),
    *rows("log_prior", (broken(FIRE).given(IDS), NOT_FINITE), (GAUSSIAN.given(STATES * NAN), NOT_FINITE)),
    *rows("log_prior", (PROFILES.given(STATES * math.inf), NOT_FINITE), (FIRE.given(torch.full((6,), NAN)), "NaN")),
    *rows("log_prior", (Odd(torch.zeros(3, 2)).given(STATES), FIRST_DIMENSION)),
    *rows("log_prior", (Odd(torch.zeros(())).given(STATES), FIRST_DIMENSION)),
    *rows("log_prior", (Odd([1.0]).given(STATES), "floating-point tensors are needed")),
    *rows("log_prior", (Odd(torch.zeros(1).to_sparse()).given(STATES), "a dense tensor is needed")),
    *rows("log_prior", (deepcopy(GAUSSIAN).to("meta").given(STATES.to("meta")), "must be on the same device")),
    *rows(
        "log_prior",
        (given("gaussian", Q), "a subclass of ConditionedPrior is needed"),
        (given(PROFILES, Q), "subclass"),
    ),
    *rows("log_prior", (given(ba.ProfileBank, None), "floating-point tensors are needed")),
    *rows("log_prior", (given(ba.ProfileBank, torch.zeros(2, 3, 6, 3)), "[2 or 1, 4 or 1, 6, number] is needed")),
    *rows("log_prior", (given(ba.ProfileBank, torch.zeros(4, 6, 3)), "[2 or 1, 4 or 1, 6, number] is needed")),
]
FUNCTIONS: dict[str, Callable[..., object]] = {
    "bayesian_attention": lambda prior: ba.bayesian_attention(Q, KV, KV, prior),
    "attention_with_lse": lambda prior: ba.attention_with_lse(Q, KV, KV, prior),
    "attention_plan": lambda prior: ba.attention_plan(Q, KV, KV, prior),
    "posterior": lambda prior: ba.posterior(Q, KV, prior),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_conditioned_prior_that_cannot_be_is_refused_in_one_sentence(function: str, tried: Tried) -> None:
    for row in ATTENTION:
        check_refused(lambda row=row: FUNCTIONS[function](row.given), row.says)
    tried("bad inputs", len(ATTENTION))


def test_kernels_that_cannot_say_so() -> None:
    prior = GAUSSIAN.given(STATES)
    check_refused(
        lambda: ba.bayesian_attention(Q, KV, KV, prior, implementation="flex"),
        "implementation 'flex' has no priors that depend on the query; use 'blockwise'",
    )


@pytest.mark.parametrize("kernel", ["reference", "blockwise", "sdpa"])
def test_rows_of_another_shape_are_refused(kernel: str) -> None:
    prior = Odd().given(STATES)
    check_refused(
        lambda: ba.bayesian_attention(Q, KV, KV, prior, implementation=kernel),
        "Odd.rows returned shape [3] for parameters [1, 1, 6, 1] and 6 distances; [batch, heads, 6, 6] is needed",
    )


MAKE: dict[str, Callable[[Any], object]] = {
    "ConditionedGaussian.num_heads": lambda given: ba.ConditionedGaussian(given, 10),
    "ConditionedGaussian.width": lambda given: ba.ConditionedGaussian(4, given),
    "ConditionedGaussian.hidden": lambda given: ba.ConditionedGaussian(4, 10, hidden=given),
    "ProfileBank.num_heads": lambda given: ba.ProfileBank(given, 10),
    "ProfileBank.width": lambda given: ba.ProfileBank(4, given),
    "ProfileBank.rank": lambda given: ba.ProfileBank(4, 10, rank=given),
    "ProfileBank.extent": lambda given: ba.ProfileBank(4, 10, extent=given),
    "Fire.num_heads": lambda given: ba.Fire(given, 8),
    "Fire.training_length": lambda given: ba.Fire(4, given),
    "Fire.hidden": lambda given: ba.Fire(4, 8, hidden=given),
    "gaussian.given": GAUSSIAN.given,
    "profiles.given": PROFILES.given,
    "product.given": (PROFILES * ba.Window(4, 3)).given,
    "fire.given": FIRE.given,
    "static.given": ba.Laplace(4).given,
    "static_product.given": (ba.Laplace(4) * ba.Window(4, 3)).given,
    "product.factor": lambda given: [GAUSSIAN * given],
    "given_product.factor": lambda given: [GAUSSIAN.given(STATES) * given],
}
POSITIONS = "positions of queries, numbers [queries] or [batch, queries], are needed"
ARGUMENTS = [
    *rows(
        "ConditionedGaussian.num_heads ProfileBank.num_heads Fire.num_heads",
        *((value, "a whole number of heads from 1 to 65,536") for value in (0, -1, 1.5, "2", None, True, HUGE)),
    ),
    *rows(
        "ConditionedGaussian.width ConditionedGaussian.hidden ProfileBank.width ProfileBank.rank ProfileBank.extent "
        "Fire.training_length Fire.hidden",
        *((value, "a whole number from 1 to") for value in (0, -1, 1.5, "2", None, True, NAN, HUGE)),
    ),
    *rows(
        "gaussian.given profiles.given product.given",
        (STATES[..., :9], "[batch, queries, 10] is needed"), (STATES[0], "[batch, queries, 10] is needed"),
        (STATES.long(), "a floating-point tensor is needed"), (None, "a floating-point tensor is needed"),
        ([1.0], "a floating-point tensor is needed"), (STATES.cfloat(), "a floating-point tensor is needed"),
    ),
    *rows("fire.given", *((value, POSITIONS) for value in (None, [0, 1], STATES, torch.zeros(6, dtype=torch.cfloat)))),
    *rows("static.given", (STATES, "Laplace does not depend on states; give the prior itself to attention")),
    *rows("static_product.given", (STATES, "Product does not depend on states")),
    *rows("product.factor given_product.factor", (ba.Window(3, 3), "the same number of heads in both")),
    *rows(
        "product.factor given_product.factor",
        *((other, "both depend on the query") for other in (PROFILES, PROFILES * ba.Uniform(4), FIRE.given(IDS))),
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_an_argument_of_a_conditioned_prior_is_refused_in_one_sentence(row: Row, tried: Tried) -> None:
    check_refused(lambda: MAKE[row.name](row.given), row.says)
    tried("bad inputs", 1)


def test_the_cache_needs_the_parameters_of_its_queries_in_one_sentence() -> None:
    check_refused(lambda: ba.LayerCache(GAUSSIAN).attend(Q, KV, KV), "needs parameters=prior(states) of the queries")
    check_refused(lambda: ba.LayerCache(GAUSSIAN).attend(Q, KV, KV, GAUSSIAN(STATES[:, :5])), "the states of 5 queries")
    check_refused(lambda: ba.LayerCache(GAUSSIAN).attend(Q, KV, KV, GAUSSIAN(STATES) * NAN), NOT_FINITE)
    check_refused(lambda: ba.LayerCache(ba.Laplace(4)).attend(Q, KV, KV, GAUSSIAN(STATES)), "takes no parameters")
    check_refused(lambda: ba.LayerCache(GAUSSIAN.given(STATES)), "a cache needs the layer's Prior or ConditionedPrior")
