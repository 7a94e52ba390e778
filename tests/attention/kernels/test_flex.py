"""FlexAttention's kernel compiled for the CPU, forward; gradients through its eager form."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import bayesattn as ba
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import flex
from bayesattn.attention.kernels import registry as kernels
from bayesattn.attention.plan import PlanLimits
from tests.attention.cases import gradients, random_case

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs a C++ compiler")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's eager form, which has gradients on the CPU once its check of the device is out of the way."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_attend", lambda: torch_flex.flex_attention)
    monkeypatch.setitem(kernels._KERNELS, "flex", ba.Kernel(flex.forward, differentiable=True))
    yield
    torch.compiler.reset()


@compiler
@pytest.mark.parametrize(
    "settings",
    [
        {"queries": 200, "kv_heads": 2},
        {"queries": 130, "keys": 300, "documents": True, "hidden": 0.2, "scaled": "batch", "scale_prior": False},
    ],
)
def test_compiled_values_are_the_reference(settings: dict[str, Any]) -> None:
    case = random_case(**settings, size=16).to(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(case.attend("flex"), case.attend("reference"), rtol=1e-4, atol=1e-5)


@compiler
def test_the_compiled_kernel_skips_what_the_plan_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    block_mask = flex._block_mask
    monkeypatch.setattr(flex, "_block_mask", lambda *args: masks.append(block_mask(*args)) or masks[-1])
    q, k, v = torch.randn(3, 1, 2, 1000, 16)
    prior = ba.GeneralizedGaussian.from_shape([1.0, -0.5], [1.0, 8.0])
    with torch.no_grad():
        problem = make_problem(q, k, v, prior, tolerance=1e-6)
        out = flex.forward(problem, PlanLimits(least_queries=1)).out
        exact = ba.bayesian_attention(q.double(), k.double(), v.double(), prior, implementation="reference")
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    local, retrieval = masks[0].kv_num_blocks[0].tolist()
    assert max(local) == 2
    assert retrieval == list(range(1, 9))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "settings",
    [
        {"queries": 1},
        {"queries": 63, "kv_heads": 2, "scaled": None},
        {"queries": 63, "keys": 150, "scaled": "batch", "scale_prior": False},
        {"queries": 130, "causal": False, "hidden": 0.3},
        {"queries": 50, "documents": True, "kv_heads": 1},
        {"queries": 20, "keys": 10, "query_offset": -5},
    ],
)
def test_values_and_gradients_are_the_reference(settings: dict[str, Any]) -> None:
    case = random_case(**settings)
    grad_out = torch.randn_like(case.q)
    for ours, expected in zip(gradients(case, "flex", grad_out), gradients(case, "reference", grad_out), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_it_is_never_chosen_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_attend", lambda: pytest.fail("flex was used"))
    q = torch.randn(1, 1, 300, 16)
    ba.bayesian_attention(q, q, q)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(1, 1, 300, 16, requires_grad=True), "has no gradients on the CPU; use 'blockwise'"),
        (torch.zeros(1, 1, 300, 16, dtype=torch.float64), "has no float64"),
        (torch.zeros(1, 1, 0, 16), "needs at least one sequence, query and key"),
    ],
    ids=["gradients", "float64", "no queries"],
)
def test_it_says_what_it_cannot_do(q: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"implementation 'flex' {message}"):
        ba.bayesian_attention(q, q.detach(), q.detach(), implementation="flex")
