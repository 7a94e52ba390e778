"""Sinks at the limits: what is not finite, low precision, and what pruning leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.attention import plan as planning
from bayesattn.attention import sinks as sinking
from bayesattn.attention.kernels import reference
from tests.attention.cases import KERNELS
from tests.attention.test_plan import SMALL, Setting, check_many, settings_of

everywhere = pytest.mark.parametrize("kernel", ["reference", *KERNELS])
kernels = pytest.mark.parametrize("kernel", KERNELS)
IDS = torch.arange(40)[None] // 10

# The queries that see key 2, a sink, and those that see key 25.
SETTINGS: dict[str, tuple[dict[str, Any], set[int], set[int]]] = {
    "window": ({}, {*range(2, 40)}, {*range(25, 29)}),
    "documents": ({"document_ids": IDS}, {*range(2, 10)}, {*range(25, 29)}),
    "both sides": ({"causal": False}, {*range(40)}, {*range(22, 29)}),
    "late": ({"query_offset": 20, "queries": 20}, {*range(20)}, {*range(5, 9)}),
}
LOG_PRIOR = torch.tensor([[0.0, 0.3, 0.5], [0.1, -torch.inf, 1.0]])  # head 1 does not see its sink 1


def inputs(queries: int = 40) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, 40, 40)]


def sinks() -> ba.Sinks:
    made = ba.Sinks(ba.Window(2, 4), 3)
    with torch.no_grad():
        made.log_prior.copy_(LOG_PRIOR)
    return made


def broken_copies(tensors: list[Tensor], which: str, position: int, value: float) -> list[Tensor]:
    copies = [x.detach().clone() for x in tensors]
    copies["qkv".index(which)][0, 1, position, 3] = value
    return [x.requires_grad_() for x in copies]


@everywhere
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_not_finite_makes_nan_of_the_queries_that_see_it(
    kernel: str, value: float, which: str, name: str
) -> None:
    given, see_sink, see_other = SETTINGS[name]
    settings = {key: x for key, x in given.items() if key != "queries"}
    tensors = inputs(given.get("queries", 40))
    expected = ba.bayesian_attention(*tensors, sinks(), **settings, implementation=kernel)
    for position, rows in ((2, see_sink), (25, see_other), (1, set())):  # head 1 does not see its sink 1
        broken = broken_copies(tensors, which, position, value)
        out, lse = ba.attention_with_lse(*broken, sinks(), **settings, implementation=kernel)
        seen = torch.zeros_like(lse, dtype=torch.bool)
        seen[0, 1, sorted(rows)] = True
        assert out[seen].isnan().all()
        assert lse[seen].isnan().all()
        torch.testing.assert_close(out[~seen], expected[~seen])
        weights = ba.posterior(broken[0], broken[1], sinks(), **settings)
        assert torch.equal(weights.isnan().all(-1), seen if which == "k" else torch.zeros_like(seen))


@everywhere
def test_a_query_that_is_not_finite_gets_nan(kernel: str) -> None:
    tensors = inputs()
    expected = ba.bayesian_attention(*tensors, sinks(), implementation=kernel)
    for position in (0, 2, 30):
        out = ba.bayesian_attention(*broken_copies(tensors, "q", position, torch.nan), sinks(), implementation=kernel)
        assert out[0, 1, position].isnan().all()
        expected[0, 1, position] = torch.nan
        torch.testing.assert_close(out, expected, equal_nan=True)
        expected = ba.bayesian_attention(*tensors, sinks(), implementation=kernel)


@kernels
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("which", "position"), [("k", 2), ("v", 2), ("k", 25), ("q", 30)])
def test_an_output_without_a_gradient_passes_no_nan(kernel: str, documents: bool, which: str, position: int) -> None:
    made = sinks()
    settings = {"document_ids": IDS} if documents else {}

    def gradients(tensors: list[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        out = ba.bayesian_attention(*tensors, made, **settings, implementation=kernel)
        return torch.autograd.grad(out[:, :, rows].sin().sum(), [*tensors, made.log_prior])

    tensors = inputs()
    broken = broken_copies(tensors, which, position, torch.nan)
    sound = ba.bayesian_attention(*broken, made, **settings).isfinite().all(-1).all(1)[0]
    assert 0 < sound.sum() < 40
    for ours, expected in zip(gradients(broken, sound), gradients(tensors, sound), strict=True):
        torch.testing.assert_close(ours, expected)
    assert gradients(broken, ~sound)[0].isnan().any()


@everywhere
def test_logits_too_large_are_refused(kernel: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    for scale in (1e38, 3e38):
        with pytest.raises(ValueError, match="at most 1e\\+29 is allowed"):
            ba.bayesian_attention(q, k, v, sinks(), query_scale=torch.full((2, 40), scale), implementation=kernel)


@everywhere
def test_a_nan_in_the_log_prior_is_refused(kernel: str) -> None:
    made = ba.Sinks(ba.Laplace(2), 2, init=1.0)
    for value in (torch.nan, torch.inf, 1e29):
        made.log_prior.data[1, 0] = value
        with pytest.raises(ValueError, match=r"Sinks gives NaN or more than 1e\+28 for heads \[1\]"):
            ba.bayesian_attention(*inputs(), made, implementation=kernel)


def plainly(q: Tensor, k: Tensor, v: Tensor, made: ba.Sinks) -> Tensor:
    """The formula in the precision of q throughout."""
    n = q.shape[2]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    bias = made.prior(torch.arange(n)).to(q.dtype)[:, distance.clamp(min=0)]
    bias = torch.cat([made.log_prior.to(q.dtype)[:, None].expand(-1, n, -1), bias[..., made.count :]], -1)
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_is_at_most_twice_that_of_the_plain_computation(kernel: str, dtype: torch.dtype) -> None:
    made = ba.Sinks(ba.Laplace(4, [0.01, 0.1, 0.5, 1.0], learned=True), 4, init=1.0)
    exact = [torch.randn(1, 4, 200, 16).to(dtype).double() for _ in range(3)]
    grad = torch.randn(1, 4, 200, 16, dtype=torch.float64)
    results = []
    for way in ("exact", "plain", kernel):
        tensors = [x.to(torch.float64 if way == "exact" else dtype).requires_grad_() for x in exact]
        if way == kernel:
            out = ba.bayesian_attention(*tensors, made, implementation=kernel)
            assert out.dtype == dtype
        else:
            out = plainly(*tensors, made)
        results.append([out, *torch.autograd.grad(out, [*tensors, made.log_prior], grad.to(out.dtype))])
    for x, plain, ours in zip(*results, strict=True):
        allowed = 2 * (plain.double() - x).norm() + torch.finfo(torch.float32).eps * x.norm()
        assert (ours.double() - x).norm() <= allowed


@kernels
def test_float64_is_computed_in_float64(kernel: str) -> None:
    q, k, v = (x.detach().double() for x in inputs())
    made = sinks().double()
    ours = ba.bayesian_attention(q, k, v, made, implementation=kernel)
    torch.testing.assert_close(
        ours, ba.bayesian_attention(q, k, v, made, implementation="reference"), atol=1e-14, rtol=0
    )


def check_mass(setting: Setting) -> bool:
    """Whether there is a plan of the other keys; what it leaves out is within the tolerance of the whole."""
    problem = setting.problem()
    count = 1 + setting.seed % 6
    log_prior = 3 * torch.randn(problem.q.shape[1], count, dtype=torch.float64)
    others = sinking._split(problem, log_prior)[1]
    made = planning.plan(others, SMALL)
    if made is None or others.num_keys == 0:
        return False
    weights = reference.softmax_of_visible(sinking._dense_logits(problem, log_prior))
    shift = problem.num_keys - others.num_keys
    key = torch.arange(problem.num_keys) - shift
    block = torch.arange(problem.num_queries) // made.rows
    outside = (key < made.start[:, block, None]) | (key >= made.stop[:, block, None])
    first = problem.documents[..., 0] if setting.documents else torch.zeros(1, problem.num_queries)
    slot = torch.arange(problem.num_keys) - first.unsqueeze(-1)
    is_sink = (slot >= 0) & (slot < count)
    assert (weights * (outside & ~is_sink.unsqueeze(1))).sum(-1).max() <= max(setting.tolerance, 1e-300)
    return True


def test_the_mass_left_out_never_exceeds_the_tolerance() -> None:
    assert check_many(150, settings_of(), check_mass) > 30


@pytest.mark.slow
def test_the_mass_left_out_never_exceeds_the_tolerance_in_ten_thousand_cases(
    tried: Callable[[str, int], None],
) -> None:
    tried("pruning problems with sinks", 10_000)
    tried("pruning problems with sinks in which keys were left out", check_many(10_000, settings_of(), check_mass))


@kernels
@pytest.mark.parametrize("documents", [False, True])
def test_the_output_of_a_pruned_call_is_off_by_at_most_twice_the_tolerance(kernel: str, documents: bool) -> None:
    made = ba.Sinks(ba.Laplace(2, [0.05, 0.5]), 4, init=-2.0)
    q, k, v = torch.randn(3, 1, 2, 2100, 4)
    settings: dict[str, Any] = {"document_ids": (torch.arange(2100)[None] > 1500).long()} if documents else {}
    exact = ba.bayesian_attention(q, k, v, made, implementation="reference", **settings)
    plan = ba.attention_plan(q, k, v, made, tolerance=1e-3, **settings)
    assert plan.kept().max() < 0.7
    out = ba.bayesian_attention(q, k, v, made, tolerance=1e-3, implementation=kernel, **settings)
    assert (out - exact).norm(dim=-1).max() <= 2e-3 * v.norm(dim=-1).max() + 1e-5


def test_the_plan_counts_the_sinks_and_the_positions_of_all_keys() -> None:
    q, k, v = torch.randn(3, 1, 2, 2304, 4)
    plain = ba.attention_plan(q, k, v, ba.Window(2, 128))
    plan = ba.attention_plan(q, k, v, ba.Sinks(ba.Window(2, 128), 4))
    assert torch.equal(plan.visible, plain.visible)
    assert plan.start[0, -1] == plain.start[0, -1]  # the window is where it was
    assert plan.stop[0, -1] == plain.stop[0, -1]
    blocks = len(plan.visible)
    within = 4 + 3  # sinks that the windows of the first two blocks have anyway
    assert (plan.logits() - plain.logits()).tolist() == [(4 * blocks - within) * plan.rows] * 2
    assert plan.kept()[0] > plain.kept()[0]
    assert torch.equal(plan.coarser(2).sinks, torch.full((blocks // 2,), 4))
    assert "of" in str(plan)
