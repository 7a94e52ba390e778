"""The public functions: what they accept, and that they agree with each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bayesattn as ba

Q = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 6, 8)


def test_a_longer_table_is_cut_to_the_distances_that_occur() -> None:
    table = torch.randn(4, 50)
    short = ba.bayesian_attention(Q, KV, KV, table[:, :6])
    assert torch.equal(ba.bayesian_attention(Q, KV, KV, table), short)
    both_sides = torch.randn(4, 51)
    short = ba.bayesian_attention(Q, KV, KV, both_sides[:, 20:31], causal=False)
    assert torch.equal(ba.bayesian_attention(Q, KV, KV, both_sides, causal=False), short)


def test_a_prior_and_its_table_are_the_same() -> None:
    prior = ba.GeneralizedGaussian(4, "spread")
    table = prior(torch.arange(6))
    assert torch.equal(ba.bayesian_attention(Q, KV, KV, prior), ba.bayesian_attention(Q, KV, KV, table))


def test_a_module_as_query_scale_is_given_the_counts() -> None:
    scale = ba.ScalableSoftmax(4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [-1, 5, 5, 5, 5, 5]])
    counts = ba.visible_counts(6, 6, document_ids=ids)
    by_hand = ba.bayesian_attention(Q, KV, KV, query_scale=scale(counts), document_ids=ids)
    assert torch.equal(ba.bayesian_attention(Q, KV, KV, query_scale=scale, document_ids=ids), by_hand)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "sdpa"])
def test_no_tokens_are_no_problem(implementation: str) -> None:
    for queries, keys in [(0, 0), (0, 5), (3, 0)]:
        q = torch.randn(1, 2, queries, 4, requires_grad=True)
        kv = torch.randn(1, 2, keys, 4, requires_grad=True)
        out = ba.bayesian_attention(q, kv, kv, ba.Laplace(2), implementation=implementation)
        assert out.shape == (1, 2, queries, 4)
        assert not out.any()
        out.sum().backward()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"log_prior": ba.GeneralizedGaussian(4, "spread"), "query_scale": ba.ScalableSoftmax(4)},
    {"log_prior": ba.Laplace(4), "query_scale": torch.randn(4, 6), "scale_prior": False, "softmax_scale": 0.3},
    {"log_prior": ba.Window(4, 2), "causal": False},
    {"log_prior": ba.Window(4, 3), "query_offset": 4},
    {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1], [-1, 5, 5, 5, 5, 5]])},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ", ".join(settings) or "defaults")
def test_the_posterior_is_what_attention_mixes_values_with(settings: dict[str, Any]) -> None:
    weights = ba.posterior(Q, KV, **settings)
    assert weights.shape == (2, 4, 6, 6)
    mixed = weights @ KV.repeat_interleave(2, 1)
    torch.testing.assert_close(mixed, ba.bayesian_attention(Q, KV, KV, **settings))
    total = weights.sum(-1)
    torch.testing.assert_close(total, total.round())  # 1, or 0 for a query that sees nothing


def test_a_query_that_sees_nothing_has_a_posterior_of_zeros() -> None:
    ids = torch.tensor([[-1, 5, 5, 5, 5, 5], [0] * 6])
    weights = ba.posterior(Q, KV, document_ids=ids)
    assert not weights[0, :, 0].any()
    assert not weights[0, :, :, 0].any()
    assert weights[1, :, 0, 0].eq(1).all()


def test_the_posterior_is_differentiable_in_all_its_inputs() -> None:
    prior, scale = ba.Laplace(4, learned=True), ba.ScalableSoftmax(4)
    q, k = Q.clone().requires_grad_(), KV.clone().requires_grad_()
    weights = ba.posterior(q, k, prior, query_scale=scale)
    gradients = torch.autograd.grad(weights.square().sum(), [q, k, prior.slopes, scale.s])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_posterior_is_in_working_precision(dtype: torch.dtype) -> None:
    weights = ba.posterior(Q.to(dtype), KV.to(dtype))
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_plan_of_a_short_call_keeps_everything() -> None:
    plan = ba.attention_plan(Q, KV, KV, ba.Laplace(4), tolerance=1e-3, implementation="sdpa")
    assert plan.kept().tolist() == [1.0] * 4


def test_importing_the_package_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    heavy = {"transformers", "matplotlib", "typer", "rich", "datasets"}
    code = f"import sys, bayesattn; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
