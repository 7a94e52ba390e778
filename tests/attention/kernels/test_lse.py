"""The log-sum-exp of every kernel, its gradient, and what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.attention.cases import KERNELS, Case, random_case

CASES: list[dict[str, Any]] = [
    {},
    {"scaled": None},
    {"kv_heads": 2, "scaled": "batch", "scale_prior": False},
    {"documents": True, "kv_heads": 1},
    {"causal": False, "hidden": 0.5},
    {"keys": 5, "query_offset": -3},
]


def with_lse(case: Case, kernel: str) -> tuple[Tensor, Tensor]:
    return ba.attention_with_lse(
        case.q, case.k, case.v, case.table, query_scale=case.query_scale, implementation=kernel, **case.settings
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_output_and_log_sum_exp_and_their_gradients_are_the_reference(kernel: str, settings: dict[str, Any]) -> None:
    case = random_case(33, **settings)
    results = []
    for way in ("reference", kernel):
        tensors = [x.clone().requires_grad_() for x in case.tensors()]
        fresh = Case(*tensors[:4], tensors[4] if len(tensors) == 5 else None, case.settings)
        out, lse = with_lse(fresh, way)
        seen = lse.isfinite()
        loss = out.sin().sum() + lse[seen].sin().sum()
        alone = torch.autograd.grad(lse[seen].sum(), tensors, retain_graph=True, allow_unused=True)
        results.append(
            [out, lse, *torch.autograd.grad(loss, tensors), *(x for x in alone if x is not None and x.any())]
        )
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
def test_the_log_sum_exp_is_that_of_the_logits(kernel: str) -> None:
    case = random_case(20, scaled=None)
    logits = case.q @ case.k.mT * 8**-0.5
    distance = torch.arange(20)[:, None] - torch.arange(20)
    logits = torch.where(distance >= 0, logits + case.table[:, distance.clamp(min=0)], -torch.inf)
    torch.testing.assert_close(with_lse(case, kernel)[1], logits.logsumexp(-1))


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
def test_a_query_that_sees_nothing_has_minus_infinity(kernel: str) -> None:
    table = torch.zeros(2, 4)
    table[1, 0] = -torch.inf
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    _, lse = ba.attention_with_lse(q, k, v, table, implementation=kernel)
    assert lse[0, 1, 0] == -torch.inf
    assert lse.isneginf().sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_in_working_precision(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    out, lse = ba.attention_with_lse(q, q, q)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)


def test_two_attentions_over_different_keys_merge_to_one() -> None:
    q, k, v = (torch.randn(1, 4, 50, 8, dtype=torch.float64) for _ in range(3))
    prior = ba.GeneralizedGaussian(4, "spread")
    near = prior * ba.Window(4, 10)
    table = prior(torch.arange(50, dtype=torch.float64)).detach()
    table[:, :10] = -torch.inf
    near_out, near_lse = ba.attention_with_lse(q, k, v, near)
    far_out, far_lse = ba.attention_with_lse(q, k, v, table)
    share = (near_lse - far_lse).sigmoid().unsqueeze(-1)
    torch.testing.assert_close(share * near_out + (1 - share) * far_out, ba.bayesian_attention(q, k, v, prior))


def test_an_unknown_setting_gets_one_sentence() -> None:
    q = torch.randn(1, 2, 5, 8)
    for function in (ba.attention_with_lse, ba.attention_plan):
        with pytest.raises(TypeError, match="has no setting 'tolerence'; did you mean 'tolerance'"):
            function(q, q, q, tolerence=0.1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_plan_changes_no_table(kernel: str, scaled: bool) -> None:
    q = torch.randn(1, 1, 2048, 4, dtype=torch.float64)
    table = 5.0 - 0.1 * torch.arange(2048, dtype=torch.float64)[None]  # its peak is not 0
    results = []
    for way in ("reference", kernel):
        given = table.clone().requires_grad_()
        scale = torch.rand(1, 2048, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out, lse = ba.attention_with_lse(q, q, q, given, query_scale=scale if scaled else None, implementation=way)
        gradients = torch.autograd.grad((out.sum() + lse.sum()), [given, *([scale] if scaled else [])])
        assert torch.equal(given, table)
        results.append([out.detach(), lse.detach(), *gradients])
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)
