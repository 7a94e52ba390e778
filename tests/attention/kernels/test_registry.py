"""Every kernel against the reference: values and gradients of all five inputs, over all that can be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import reference, registry
from bayesattn.attention.kernels.registry import nested
from tests.attention.cases import KERNELS, Case, gradients, random_case

kernels = pytest.mark.parametrize("kernel", KERNELS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    keys = draw(st.integers(0, 140))
    documents = draw(st.booleans())
    queries = draw(st.integers(0, keys if documents else 140))
    offsets = st.integers(0, keys - queries) if documents else st.integers(-20, 150)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return random_case(
        queries,
        keys,
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        size=draw(st.sampled_from([1, 4, 7])),
        scaled=draw(st.sampled_from([None, "heads", "batch"])),
        documents=documents,
        hidden=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**31)),
        causal=draw(st.booleans()),
        scale_prior=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, 0.7, -0.3])),
        query_offset=draw(st.one_of(offsets, st.none() if keys >= queries else offsets)),
    )


@kernels
@settings(max_examples=150)
@given(case=cases())
def test_values_and_gradients_are_the_reference(kernel: str, case: Case) -> None:
    grad_out = torch.randn_like(case.q)
    for ours, expected in zip(gradients(case, kernel, grad_out), gradients(case, "reference", grad_out), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def spelled_out() -> list[dict[str, Any]]:
    odd = [1, 2, 63, 111, 129]
    return [
        *({"queries": n} for n in odd),
        *({"queries": n, "scaled": None} for n in odd),
        {"queries": 63, "causal": False},
        {"queries": 63, "kv_heads": 2, "scaled": "batch"},
        {"queries": 63, "kv_heads": 1, "scale_prior": False},
        {"queries": 63, "documents": True, "kv_heads": 2},
        {"queries": 5, "keys": 111},
        {"queries": 30, "keys": 111, "query_offset": 40},
    ]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", spelled_out(), ids=str)
def test_error_is_at_most_twice_that_of_the_plain_computation(
    kernel: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    case = random_case(**settings, size=32).to(dtype)
    grad_out = torch.randn(case.q.shape).to(dtype)
    exact = gradients(case.to(torch.float64), "reference", grad_out)
    plain = gradients(case, "plain", grad_out)
    ours = gradients(case, kernel, grad_out)
    for name, x, y, z in zip(["out", "q", "k", "v", "log_prior", "query_scale"], exact, plain, ours, strict=False):
        allowed = 2 * (y.double() - x).norm() + torch.finfo(torch.float32).eps * x.norm()
        assert (z.double() - x).norm() <= allowed, name
        assert z.dtype == y.dtype


@kernels
@pytest.mark.parametrize("settings", [{"causal": True}, {"causal": False}, {"documents": True}], ids=str)
@pytest.mark.parametrize("scale_prior", [False, True])
def test_gradcheck_of_all_five_inputs(kernel: str, settings: dict[str, Any], scale_prior: bool) -> None:
    case = random_case(7, 9, batch=2, heads=2, kv_heads=1, size=3, scaled="batch", scale_prior=scale_prior, **settings)
    tensors = [t.requires_grad_() for t in case.tensors()]

    def attend(q, k, v, table, scale):  # type: ignore[no-untyped-def]
        return Case(q, k, v, table, scale, case.settings).attend(kernel)

    assert torch.autograd.gradcheck(attend, tensors)


@kernels
def test_inputs_of_any_strides(kernel: str) -> None:
    tokens_first = [torch.randn(2, 33, 4, 8).transpose(1, 2) for _ in range(3)]
    spread_out = [torch.randn(2, 4, 66, 16)[:, :, ::2, ::2] for _ in range(3)]
    expanded = [torch.randn(1, 1, 33, 8).expand(2, 4, 33, 8) for _ in range(3)]
    prior = ba.Laplace(4)
    for inputs in (tokens_first, spread_out, expanded):
        q, k, v = (x.requires_grad_() for x in inputs)
        expected = ba.bayesian_attention(q, k, v, prior, implementation="reference")
        ours = ba.bayesian_attention(q, k, v, prior, implementation=kernel)
        torch.testing.assert_close(ours, expected)
        for dx, dy in zip(
            torch.autograd.grad(ours.sin().sum(), (q, k, v)),
            torch.autograd.grad(expected.sin().sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(dx, dy)


@kernels
def test_one_row_at_a_time_is_the_whole(kernel: str) -> None:
    q, k, v = (torch.randn(1, 4, 21, 8) for _ in range(3))
    prior, scale = ba.GeneralizedGaussian(4, "spread"), ba.ScalableSoftmax(4)
    whole = ba.bayesian_attention(q, k, v, prior, query_scale=scale, implementation=kernel)
    for n in range(1, 22):
        row = ba.bayesian_attention(
            q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], prior, query_scale=scale, implementation=kernel
        )
        torch.testing.assert_close(row, whole[:, :, n - 1 : n])


@kernels
def test_packed_documents_are_the_documents_by_themselves(kernel: str) -> None:
    lengths = [5, 1, 17, 8]
    q, k, v = (torch.randn(1, 4, sum(lengths), 8) for _ in range(3))
    prior, scale = ba.GeneralizedGaussian(4, "spread"), ba.ScalableSoftmax(4)
    ids = torch.repeat_interleave(torch.tensor([7, 3, 0, 9]), torch.tensor(lengths))[None]
    packed = ba.bayesian_attention(q, k, v, prior, query_scale=scale, document_ids=ids, implementation=kernel)
    alone = [
        ba.bayesian_attention(a, b, c, prior, query_scale=scale, implementation=kernel)
        for a, b, c in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 2))


@kernels
def test_the_first_token_attends_to_itself_though_its_scale_is_zero(kernel: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    prior = ba.Window(2, 3) * ba.GeneralizedGaussian.from_shape([-1.0, 1.0], [1.0, 1.0])
    out = ba.bayesian_attention(q, k, v, prior, query_scale=ba.ScalableSoftmax(2), implementation=kernel)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


@kernels
@pytest.mark.parametrize("scale", [-1.0, 0.0, 2.0])
def test_a_hidden_key_stays_hidden_at_any_scale(kernel: str, scale: float) -> None:
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    v[:, :, :3] = 1e6
    out = ba.bayesian_attention(q, k, v, ba.Window(1, 3), query_scale=torch.full((1, 6), scale), implementation=kernel)
    assert out[0, 0, 5].abs().max() < 100


@kernels
def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient(kernel: str) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    table = torch.zeros(2, 4)
    table[1, 0] = -torch.inf  # head 1 cannot see its own position, so its first query sees nothing
    table.requires_grad_()
    out = ba.bayesian_attention(q, k, v, table, implementation=kernel)
    assert not out[0, 1, 0].any()
    assert out[0, 0, 0].any()
    out.sum().backward()
    for x in (q, k, v, table):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert q.grad is not None
    assert not q.grad[0, 1, 0].any()


@kernels
def test_a_lone_visible_key_passes_no_noise_to_a_steep_prior(kernel: str) -> None:
    prior = ba.GeneralizedGaussian.from_shape([-1.0] * 8, [1.0] * 8)
    q, k, v = (torch.randn(16, 8, 1, 64) for _ in range(3))
    (ba.bayesian_attention(q, k, v, prior, implementation=kernel) * torch.randn(64)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in prior.parameters())


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
def test_compiles_without_a_graph_break_and_checkpoints(kernel: str) -> None:
    prior, scale = ba.GeneralizedGaussian(4, "spread"), ba.ScalableSoftmax(4)
    ids = torch.tensor([[0] * 10 + [1] * 23, [-1] * 3 + [5] * 30])

    def attend(q, k, v, ids):  # type: ignore[no-untyped-def]
        return ba.bayesian_attention(q, k, v, prior, query_scale=scale, document_ids=ids, implementation=kernel)

    ways = {
        "eager": attend,
        "compiled": torch.compile(attend, backend="aot_eager", fullgraph=True),
        "checkpointed": lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False),
    }
    results = {}
    for name, way in ways.items():
        torch.manual_seed(1)
        q, k, v = (torch.randn(2, 4, 33, 8, requires_grad=True) for _ in range(3))
        parameters = [q, k, v, *prior.parameters(), *scale.parameters()]
        out = way(q, k, v, ids)
        results[name] = [out.detach(), *torch.autograd.grad(out.square().sum(), parameters)]
    for name in ("compiled", "checkpointed"):
        for ours, expected in zip(results[name], results["eager"], strict=True):
            torch.testing.assert_close(ours, expected)


def test_compiled_with_lengths_that_change() -> None:
    prior, scale = ba.Laplace(4, learned=True), ba.ScalableSoftmax(4)
    attend = torch.compile(
        lambda q, k, v: ba.bayesian_attention(q, k, v, prior, query_scale=scale),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for n in (5, 9, 17):
        q, k, v = (torch.randn(1, 4, n, 8) for _ in range(3))
        expected = ba.bayesian_attention(q, k, v, prior, query_scale=scale)
        torch.testing.assert_close(attend(q, k, v), expected)


def test_the_operator_keeps_its_promises_to_torch() -> None:
    case = random_case(9, scaled="batch", documents=True)
    conditioned = ba.ProfileBank(4, 6, rank=3, extent=5).double()
    states = torch.randn(2, 9, 6, dtype=torch.float64)
    for prior in (case.table, replace(conditioned.given(states), static=case.table)):
        problem = make_problem(case.q, case.k, case.v, prior, query_scale=case.query_scale, **case.settings)
        tensors = [
            x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in problem.tensors()
        ]
        torch.library.opcheck(
            torch.ops.bayesattn.attend.default, nested(tensors), {**problem.settings(), "kernel": "blockwise"}
        )


def test_a_kernel_is_one_function_and_serves_every_prior() -> None:
    seen = []

    def loop_over_queries(problem: ba.Problem) -> ba.Solution:
        seen.append(problem.q.shape)
        rows = [reference.forward(problem).out[:, :, i] for i in range(problem.num_queries)]
        return ba.Solution(torch.stack(rows, 2))

    ba.register_kernel("loop", ba.Kernel(loop_over_queries))
    try:
        case = random_case(6)
        grad_out = torch.randn_like(case.q)
        for ours, expected in zip(
            gradients(case, "loop", grad_out), gradients(case, "reference", grad_out), strict=True
        ):
            torch.testing.assert_close(ours, expected)
        assert seen
        with pytest.raises(ValueError, match="'loop' is taken"):
            ba.register_kernel("loop", ba.Kernel(loop_over_queries))
    finally:
        del ba.attention.kernels.registry._KERNELS["loop"]


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_a_prior_is_a_dozen_lines_and_trains_on_every_kernel(implementation: str) -> None:
    class Ring(ba.Prior):
        """Keys about `radius` tokens back are likely: log p = −(log d − log radius)²."""

        def __init__(self, num_heads: int) -> None:
            super().__init__(num_heads)
            self.log_radius = torch.nn.Parameter(torch.ones(num_heads))

        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            log_distance = distance.abs().clamp(min=1).log()
            radius = self.log_radius.view(-1, *[1] * distance.dim())
            return -((log_distance - radius) ** 2)

    prior = Ring(2)
    optimizer = torch.optim.Adam(prior.parameters(), lr=0.05)
    q, k = torch.zeros(2, 1, 2, 64, 4)
    v = torch.arange(64.0).view(1, 1, 64, 1).expand(1, 2, 64, 4)
    for _ in range(150):  # learn to look 20 tokens back
        out = ba.bayesian_attention(q[:, :, -8:], k, v, prior, implementation=implementation)
        loss = (out - (v[:, :, -8:] - 20)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_autocast_does_not_round_what_a_kernel_keeps_precise(implementation: str) -> None:
    q, k, v = (torch.randn(1, 4, 300, 16, requires_grad=True) for _ in range(3))
    prior = ba.Laplace(4, [3.0, 1.0, 0.7, 0.3], learned=True)
    expected = ba.bayesian_attention(q, k, v, prior, query_scale=ba.ScalableSoftmax(4), implementation=implementation)
    with torch.autocast("cpu", torch.bfloat16):
        ours = ba.bayesian_attention(q, k, v, prior, query_scale=ba.ScalableSoftmax(4), implementation=implementation)
        gradients_inside = torch.autograd.grad(ours.sum(), [q, k, v, prior.slopes])
    assert torch.equal(ours, expected)
    gradients_outside = torch.autograd.grad(expected.sum(), [q, k, v, prior.slopes])
    if implementation != "reference":  # whose backward pass is autograd's own
        assert all(map(torch.equal, gradients_inside, gradients_outside))


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_the_lowest_float_hides_a_key_as_minus_infinity_does(implementation: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    low, lowest = torch.zeros(1, 5), torch.zeros(1, 5)
    low[0, 0], lowest[0, 0] = torch.finfo(torch.float32).min, -torch.inf
    ours = ba.bayesian_attention(q, k, v, low, implementation=implementation)
    assert torch.equal(ours, ba.bayesian_attention(q, k, v, lowest, implementation=implementation))
    assert not ours[0, 0, 0].any()


@kernels
def test_a_nan_is_not_pruned_away(kernel: str) -> None:
    q, k, v = (torch.randn(1, 2, 600, 8) for _ in range(3))
    k[0, 1, 300] = torch.nan
    out = ba.bayesian_attention(q, k, v, ba.Laplace(2, [2.0, 2.0]), implementation=kernel)
    assert out[0, 0].isfinite().all()
    assert out[0, 1, 300:].isnan().all()
    assert not (out[0, 1, 400:] == 0).any()


def test_a_kernel_that_returns_no_solution_is_refused() -> None:
    ba.register_kernel("tensor", ba.Kernel(lambda problem: problem.v))  # type: ignore[arg-type, return-value]
    q = torch.randn(2, 2, 4, 8)
    try:
        with pytest.raises(TypeError, match="the kernel 'tensor' returned a Tensor; a Solution is needed"):
            ba.bayesian_attention(q, q, q, implementation="tensor")
    finally:
        registry._KERNELS.pop("tensor")
