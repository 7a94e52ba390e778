"""Priors that depend on the query: every kernel against the reference, and the reference against plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import reference, rows, sdpa
from tests.attention.cases import KERNELS

WIDTH = 6
FAMILIES: dict[str, Callable[[int], ba.ConditionedPrior]] = {
    "gaussian": lambda heads: ba.ConditionedGaussian(heads, WIDTH, hidden=5),
    "profiles": lambda heads: ba.ProfileBank(heads, WIDTH, rank=3, extent=11),
    "wide profiles": lambda heads: ba.ProfileBank(heads, WIDTH, rank=3, extent=500),
    "fire": lambda heads: ba.Fire(heads, training_length=8, hidden=5),
    "window × profiles": lambda heads: ba.Window(heads, 7) * ba.ProfileBank(heads, WIDTH, rank=3, extent=500),
    "gaussian × learned": lambda heads: (
        ba.ConditionedGaussian(heads, WIDTH, hidden=5) * ba.GeneralizedGaussian(heads, "spread")
    ),
}
families = pytest.mark.parametrize("family", FAMILIES)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@dataclass
class Call:
    """A float64 call: a prior, the states or positions of its queries, and the other arguments."""

    prior: ba.ConditionedPrior
    states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    query_scale: Tensor | None
    settings: dict[str, Any]

    def attend(self, kernel: str, **settings: Any) -> Tensor:
        given_prior = self.prior.given(self.states)
        return ba.bayesian_attention(
            self.q, self.k, self.v, given_prior, query_scale=self.query_scale, implementation=kernel,
            **{**self.settings, **settings},
        )  # fmt: skip

    def leaves(self) -> list[Tensor]:
        tensors = [self.q, self.k, self.v, self.states, *self.prior.parameters()]
        tensors += [] if self.query_scale is None else [self.query_scale]
        return [x for x in tensors if x.is_floating_point()]

    def gradients(self, kernel: str) -> list[Tensor | None]:
        """The output and the gradients of all that is learned."""
        leaves = self.leaves()
        for x in leaves:
            x.requires_grad_()
        out = self.attend(kernel)
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)]


def random_call(
    family: str,
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    scaled: str | None = "batch",
    documents: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Call:
    torch.manual_seed(seed)
    keys = queries if keys is None else keys
    prior = FAMILIES[family](heads).to(torch.promote_types(dtype, torch.float32))
    states = torch.randn(batch, queries, WIDTH, dtype=torch.promote_types(dtype, torch.float32))
    if family == "fire":
        states = torch.arange(queries) + keys - queries
    if documents:
        ids = torch.randint(0, 4, (batch, keys)).eq(0).cumsum(1)
        ids[0, : keys // 4] = -1
        settings["document_ids"] = ids
    scale = {"heads": (heads, queries), "batch": (batch, heads, queries), None: None}[scaled]
    q = torch.randn(batch, heads, queries, 8, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, keys, 8, dtype=dtype)
    return Call(prior, states, q, k, v, None if scale is None else torch.randn(scale).to(q.dtype), settings)


def same(ours: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@families
@kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scaled": None},
        {"scaled": "heads", "kv_heads": 1},
        {"scale_prior": False, "kv_heads": 4},
        {"causal": False},
        {"documents": True},
        {"keys": 40, "query_offset": 3},
        {"query_offset": -4},
        {"batch": 1, "softmax_scale": 0.3},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_reference(family: str, kernel: str, settings: dict[str, Any]) -> None:
    call = random_call(family, 23, **settings)
    same(call.gradients(kernel), call.gradients("reference"))


@families
@kernels
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 30), (3, 3), (63, 63), (5, 150), (150, 5)])
def test_any_number_of_queries_and_keys(family: str, kernel: str, queries: int, keys: int) -> None:
    call = random_call(family, queries, keys)
    same(call.gradients(kernel), call.gradients("reference"))


@families
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(family: str, queries: int, keys: int) -> None:
    call = random_call(family, queries, keys, query_offset=0)
    for kernel in KERNELS:
        assert call.attend(kernel).shape == (2, 4, queries, 8)
        assert not call.attend(kernel).any()


@given(
    family=st.sampled_from([*FAMILIES]),
    kernel=st.sampled_from(KERNELS),
    queries=st.integers(1, 40),
    more=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    scaled=st.sampled_from(["heads", "batch", None]),
    causal=st.booleans(),
    scale_prior=st.booleans(),
    documents=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_call_agrees_with_the_reference(
    family: str, kernel: str, queries: int, more: int, documents: bool, **settings: Any
) -> None:
    call = random_call(family, queries, queries + more, documents=documents, **settings)
    same(call.gradients(kernel), call.gradients("reference"))


@pytest.mark.parametrize("at_once", [1, 100, 2**16])
def test_how_many_rows_are_evaluated_at_once_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", at_once)
    for family in FAMILIES:
        call = random_call(family, 31)
        same(call.gradients("blockwise"), call.gradients("reference"))


@pytest.mark.parametrize("seed", range(8))
def test_fire_is_simpler_at_some_distances_and_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    prior = ba.Fire(3, training_length=8, hidden=32).double()
    nearest, farthest = (int(x) for x in torch.randint(-30, 90, (2,)).sort().values)
    distances = torch.arange(nearest, farthest + 1, dtype=torch.float64).expand(4, -1)
    parameters = prior(torch.tensor([5, 50, 80, 90])).detach()

    def rows(shared: tuple[Tensor, ...]) -> Tensor:
        values = prior.rows(parameters, shared, distances)
        weights = torch.randn(values.shape, dtype=values.dtype, generator=torch.Generator().manual_seed(seed))
        gradients = torch.autograd.grad((values * weights).sum(), list(prior.parameters()), allow_unused=True)
        return torch.cat([x.flatten() for x in (values.detach(), *gradients) if x is not None])

    simpler = prior.simplify(parameters, prior.shared(), nearest, farthest)
    torch.testing.assert_close(rows(simpler), rows(prior.shared()))
    far = prior.simplify(prior(torch.arange(1000, 1100)), prior.shared(), 800, 1000)
    assert far[1].shape[1] <= 8  # of 32 units


@families
@torch.no_grad()
@pytest.mark.parametrize("written_keys", [1, 4, 50])
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": False}, {"documents": True}, {"keys": 45, "query_offset": 3}, {"query_offset": -4}],
    ids=str,
)
def test_the_number_of_keys_at_a_time_changes_nothing(family: str, written_keys: int, settings: dict[str, Any]) -> None:
    call = random_call(family, 31, kv_heads=4, **settings)
    problem = make_problem(
        call.q, call.k, call.v, call.prior.given(call.states), query_scale=call.query_scale, **call.settings
    )
    limits = sdpa.BlockLimits(written_rows=8, written_elements=8 * written_keys, written_keys=written_keys)
    solution = sdpa.forward(problem, limits)
    torch.testing.assert_close(solution.out, reference.forward(problem).out)


def test_keys_beyond_the_extent_of_profiles_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    real = sdpa.fused_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, **kwargs: Any) -> Any:
        masks.append((attn_mask is None, k.shape[2]))
        return real(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(sdpa, "fused_attention", spy)
    call = random_call("profiles", 300, batch=1, kv_heads=4, scaled="heads")
    expected = call.attend("reference")
    torch.testing.assert_close(call.attend("sdpa"), expected)
    # The later rows, from 256 on, see 246 keys at distances of 11 or more; the earlier ones begin at the first key.
    assert masks == [(True, 246), (False, 54), (False, 256)]
    masks.clear()
    static = call.prior * ba.Laplace(4)  # no key is without bias
    call.prior = static.double()
    torch.testing.assert_close(call.attend("sdpa"), call.attend("reference"))
    assert not any(is_plain for is_plain, _ in masks)


@families
def test_threads_of_their_own_compute_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(family, 31, batch=3)
    expected = call.gradients("reference")
    monkeypatch.setattr("bayesattn.attention.kernels.threads.LEAST_LOGITS", 1)
    for kernel in KERNELS:
        same(call.gradients(kernel), expected)


@families
@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_inputs(family: str, kernel: str, dtype: torch.dtype) -> None:
    call = random_call(family, 63, dtype=dtype)
    exact = random_call(family, 63, dtype=torch.float64)
    exact.prior.load_state_dict(call.prior.state_dict())
    exact.states = call.states.double() if call.states.is_floating_point() else call.states
    exact.q, exact.k, exact.v = call.q.double(), call.k.double(), call.v.double()
    exact.query_scale = None if call.query_scale is None else call.query_scale.double()
    expected = exact.attend("reference")
    error = (call.attend(kernel).double() - expected).abs().max()
    plain = (expected.to(dtype).double() - expected).abs().max()
    assert error <= max(2 * plain, 2e-5)


@families
def test_a_tensor_of_any_strides_will_do(family: str) -> None:
    call = random_call(family, 23)
    expected = call.attend("reference")
    call.q, call.k, call.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, call.k, call.v))
    if call.states.dim() == 3:
        call.states = call.states.mT.contiguous().mT
    for kernel in KERNELS:
        torch.testing.assert_close(call.attend(kernel), expected)


@families
def test_the_log_sum_exp_and_its_gradient(family: str) -> None:
    call = random_call(family, 23, documents=True)
    results = []
    for kernel in ("reference", *KERNELS):
        leaves = [x.requires_grad_() for x in call.leaves()]
        given_prior = call.prior.given(call.states)
        out, lse = ba.attention_with_lse(
            call.q, call.k, call.v, given_prior, query_scale=call.query_scale, implementation=kernel, **call.settings
        )
        loss = (out.sin() + lse.masked_fill(lse.isneginf(), 0.0).cos().unsqueeze(-1)).sum()
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)])
    same(results[1], results[0])
    same(results[2], results[0])


@families
def test_decoding_one_token_at_a_time_gives_the_rows_of_the_whole(family: str) -> None:
    call = random_call(family, 20)
    whole = call.attend("reference", tolerance=0.0)
    given_prior = call.prior.given(call.states)
    for i in (0, 7, 19):
        scale = None if call.query_scale is None else call.query_scale[:, :, i : i + 1]
        one = ba.GivenPrior(
            given_prior.family, 4, given_prior.parameters[:, :, i : i + 1], given_prior.shared, given_prior.static
        )
        token = ba.bayesian_attention(
            call.q[:, :, i : i + 1], call.k[:, :, : i + 1], call.v[:, :, : i + 1], one, query_scale=scale
        )
        torch.testing.assert_close(token, whole[:, :, i : i + 1])


@families
def test_it_compiles_in_one_graph(family: str) -> None:
    call = random_call(family, 23, dtype=torch.float32)
    torch.compiler.reset()
    parameters = list(call.prior.parameters())

    def loss(q: Tensor) -> Tensor:
        return ba.bayesian_attention(q, call.k, call.v, call.prior.given(call.states)).square().sum()

    q = call.q.clone().requires_grad_()
    expected = torch.autograd.grad(loss(q), [q, *parameters], allow_unused=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    same(list(torch.autograd.grad(compiled(q), [q, *parameters], allow_unused=True)), list(expected))


@families
def test_checkpointing_and_functional_gradients(family: str) -> None:
    call = random_call(family, 23)
    call.states = call.states.clone()
    expected = call.gradients("reference")
    out = checkpoint(lambda q: _with(call, q).attend("blockwise"), call.q, use_reentrant=False)
    torch.testing.assert_close(out.detach(), expected[0])
    ours = torch.func.grad(lambda q: _with(call, q).attend("blockwise").sum())(call.q.detach())
    theirs = torch.autograd.grad(call.attend("reference").sum(), call.q)[0]
    torch.testing.assert_close(ours, theirs)


def _with(call: Call, q: Tensor) -> Call:
    return Call(call.prior, call.states, q, call.k, call.v, call.query_scale, call.settings)


def test_a_broken_key_breaks_only_the_queries_that_see_it() -> None:
    call = random_call("gaussian", 23, batch=1, scaled=None)
    expected = call.attend("reference")
    call.k[0, 0, 11] = torch.nan
    for kernel in KERNELS:
        out = call.attend(kernel)
        assert out[:, :2, 11:].isnan().all()
        torch.testing.assert_close(out[:, :2, :11], expected[:, :2, :11])
        torch.testing.assert_close(out[:, 2:], expected[:, 2:])


def test_a_family_of_ones_own_is_a_module_and_a_function() -> None:
    class Slope(ba.ConditionedPrior):
        """log p(d) = −slope·|d| with a slope for every query."""

        def __init__(self, num_heads: int, width: int) -> None:
            super().__init__(num_heads)
            self.slope = nn.Linear(width, num_heads)

        def forward(self, states: Tensor) -> Tensor:
            return self.slope(states).exp().mT.unsqueeze(-1)

        @staticmethod
        def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
            return -parameters * distances.abs()

    torch.manual_seed(0)
    prior, states = Slope(2, WIDTH), torch.randn(1, 9, WIDTH)
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    out = ba.bayesian_attention(q, k, v, prior.given(states))
    slopes = prior(states)[..., 0]
    for i in range(9):
        alone = ba.bayesian_attention(
            q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], ba.Laplace(2, slopes[0, :, i].tolist())
        )
        torch.testing.assert_close(out[:, :, i : i + 1], alone)
    out.sum().backward()
    assert prior.slope.weight.grad is not None
    assert prior.slope.weight.grad.any()


def test_rows_that_are_not_finite_are_refused() -> None:
    class Logarithm(ba.ConditionedPrior):
        def forward(self, states: Tensor) -> Tensor:
            return states.new_ones(len(states), 1, states.shape[1], 1)

        @staticmethod
        def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
            return parameters * distances.log()  # NaN ahead of the query

    call = random_call("gaussian", 9)
    call.prior = Logarithm(4)
    for kernel in ("reference", *KERNELS):
        with pytest.raises(ValueError, match="Logarithm is not finite; its rows must be finite"):
            call.attend(kernel)


def test_a_kernel_without_such_priors_is_never_given_one() -> None:
    call = random_call("gaussian", 9)
    ba.register_kernel("static only", ba.Kernel(lambda problem: ba.Solution(problem.q)))
    try:
        with pytest.raises(ValueError, match="'static only' has no priors that depend on the query; use 'blockwise'"):
            call.attend("static only")
    finally:
        from bayesattn.attention.kernels import registry

        del registry._KERNELS["static only"]
