"""Attention with sinks: the reference is the formula, and every kernel is the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import bayesattn as ba
from tests.attention.cases import KERNELS
from tests.attention.sink_cases import SinkCase, by_hand, random_sinks

kernels = pytest.mark.parametrize("kernel", KERNELS)
everywhere = pytest.mark.parametrize("kernel", ["reference", "auto", *KERNELS])

CASES: list[dict[str, Any]] = [
    {},
    {"scaled": None, "count": 1},
    {"kv_heads": 2, "scaled": "batch", "scale_prior": False},
    {"documents": True, "kv_heads": 1},
    {"documents": True, "causal": False, "count": 5},
    {"causal": False, "hidden": 0.5},
    {"keys": 9, "query_offset": -3},
    {"keys": 60, "query_offset": 1, "documents": True, "scale_prior": False},
    {"keys": 5, "count": 9},
    {"keys": 3, "count": 3, "query_offset": 1},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_reference_is_the_formula(settings: dict[str, Any]) -> None:
    case = random_sinks(11, **settings)
    torch.testing.assert_close(case.attend("reference"), by_hand(case))


def outputs_and_gradients(case: SinkCase, kernel: str) -> list[Tensor]:
    tensors = [x.clone().requires_grad_() for x in case.tensors()]
    out, lse = case.of(*tensors).with_lse(kernel)
    seen = lse.isfinite()
    alone = torch.autograd.grad(lse[seen].sum(), tensors, retain_graph=True, materialize_grads=True)
    of_both = torch.autograd.grad(out.sin().sum() + lse[seen].cos().sum(), tensors, materialize_grads=True)
    return [out.detach(), lse.detach(), *alone, *of_both]


def check_is_reference(case: SinkCase, kernel: str) -> None:
    for ours, expected in zip(
        outputs_and_gradients(case, kernel), outputs_and_gradients(case, "reference"), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@kernels
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_output_and_log_sum_exp_and_all_gradients_are_the_reference(kernel: str, settings: dict[str, Any]) -> None:
    check_is_reference(random_sinks(33, **settings), kernel)


@settings(max_examples=60)
@given(
    queries=st.integers(0, 40), keys=st.integers(0, 40), offset=st.integers(-9, 20), count=st.integers(1, 12),
    documents=st.booleans(), causal=st.booleans(), scale_prior=st.booleans(),
    scaled=st.sampled_from([None, "heads", "batch"]), kv_heads=st.sampled_from([1, 2, 4]),
    hidden=st.sampled_from([0.0, 0.4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_problem_is_the_reference(queries: int, keys: int, offset: int, documents: bool, **settings: Any) -> None:
    if documents:
        queries = min(queries, keys)
        offset = min(max(offset, 0), keys - queries)
    check_is_reference(random_sinks(queries, keys, query_offset=offset, documents=documents, **settings), "blockwise")


@kernels
def test_documents_that_end_within_a_block_of_queries_are_the_reference(kernel: str) -> None:
    case = random_sinks(600, documents=True, heads=2)
    ids = case.case.settings["document_ids"]
    ids[0] = torch.arange(600) // 170  # few documents here, many in the other sequence
    check_is_reference(case, kernel)


@everywhere
def test_a_sink_is_seen_at_any_distance_and_in_no_future(kernel: str) -> None:
    q, k = torch.randn(2, 1, 2, 50, 8)
    values = torch.eye(50).expand(1, 2, 50, 50)
    settings = {} if kernel != "sdpa" else {"softmax_scale": 8**-0.5}
    if kernel == "sdpa":  # it needs values of the size of keys
        q, k = (nn.functional.pad(x, (0, 42)) for x in (q, k))
    weights = ba.bayesian_attention(q, k, values, ba.Sinks(ba.Window(2, 3), 4), implementation=kernel, **settings)
    i, j = torch.arange(50)[:, None], torch.arange(50)
    seen = (j <= i) & ((j < 4) | (i - j < 3))
    assert torch.equal(weights > 0, seen.expand(1, 2, 50, 50))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 50))


def test_sinks_of_the_priors_own_values_change_nothing() -> None:
    q, k, v = torch.randn(3, 2, 4, 20, 8, dtype=torch.float64)
    sinks = ba.Sinks(ba.Uniform(4), 4)
    for some in ({}, {"causal": False}, {"query_scale": ba.ScalableSoftmax(4)}):
        expected = ba.bayesian_attention(q, k, v, ba.Uniform(4), **some)
        torch.testing.assert_close(ba.bayesian_attention(q, k, v, sinks, **some), expected)


def test_a_query_scale_that_is_a_module_counts_the_sinks_too() -> None:
    case = random_sinks(20, scaled=None, documents=True)
    c, scale = case.case, ba.ScalableSoftmax(4).double()
    counts = ba.visible_counts(20, 20, document_ids=c.settings["document_ids"])
    given_module = ba.bayesian_attention(c.q, c.k, c.v, case.sinks(), query_scale=scale, **c.settings)
    given_tensor = ba.bayesian_attention(c.q, c.k, c.v, case.sinks(), query_scale=scale(counts.double()), **c.settings)
    assert torch.equal(given_module, given_tensor)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_posterior_is_what_attention_mixes_values_with(settings: dict[str, Any]) -> None:
    case = random_sinks(12, **settings)
    c = case.case
    weights = ba.posterior(c.q, c.k, case.sinks(), **case.settings())
    mixed = weights @ c.v.repeat_interleave(c.q.shape[1] // c.k.shape[1], 1)
    torch.testing.assert_close(mixed, case.attend("auto"))
    torch.testing.assert_close(weights.sum(-1), weights.sum(-1).round())


@everywhere
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(kernel: str) -> None:
    case = random_sinks(12, documents=True)
    case.log_prior[1, 0] = -torch.inf  # the first query of a document then sees nothing in head 1
    tensors = [x.clone().requires_grad_() for x in case.tensors()]
    out, lse = case.of(*tensors).with_lse(kernel)
    nothing = lse.isneginf()
    assert nothing[0, :, :3].all()  # padding
    assert nothing[1, 1, 0]
    assert not out[nothing].any()
    for gradient in torch.autograd.grad(out.sum() + lse[nothing].sum(), tensors):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("documents", [False, True])
def test_it_compiles_to_one_graph(documents: bool) -> None:
    ids = torch.arange(21).expand(2, -1) // 8 if documents else None
    sinks = ba.Sinks(ba.Laplace(4, learned=True), 3, init=0.5)
    tensors = [torch.randn(2, heads, 21, 8, requires_grad=True) for heads in (4, 2, 2)]

    def loss(*tensors: Tensor) -> Tensor:
        return ba.bayesian_attention(*tensors, sinks, document_ids=ids).sin().sum()

    results = []
    for way in (torch.compile(loss, backend="aot_eager", fullgraph=True), loss):
        value = way(*tensors)
        results.append([value.detach(), *torch.autograd.grad(value, [*tensors, *sinks.parameters()])])
    torch.testing.assert_close(*results)


def test_lengths_may_change_in_a_compiled_function() -> None:
    sinks = ba.Sinks(ba.Laplace(2), 4)
    attend = torch.compile(
        lambda q, k: ba.bayesian_attention(q, k, k, sinks), backend="aot_eager", dynamic=True, fullgraph=True
    )
    for queries, keys in [(6, 9), (8, 30)]:
        q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4)
        torch.testing.assert_close(attend(q, k), ba.bayesian_attention(q, k, k, sinks))


SMALL = random_sinks(7, 9, batch=2, kv_heads=2, size=3, documents=True, scaled="batch")


def attention(kernel: str) -> Any:
    return lambda *tensors: SMALL.of(*tensors).attend(kernel)


@kernels
def test_grad_and_vmap_of_torch_func_are_those_of_the_reference(kernel: str) -> None:
    def loss(kernel: str) -> Any:
        return lambda *tensors: attention(kernel)(*tensors).sin().sum()

    which = tuple(range(6))
    expected = torch.func.grad(loss("reference"), which)(*SMALL.tensors())
    torch.testing.assert_close(torch.func.grad(loss(kernel), which)(*SMALL.tensors()), expected)
    samples = [torch.stack([x, x.sin()]) for x in SMALL.tensors()]
    slices = [[x[i] for x in samples] for i in range(2)]
    gradients = torch.func.vmap(torch.func.grad(loss(kernel), which))(*samples)
    for ours, one, other in zip(
        gradients, *(torch.func.grad(loss("reference"), which)(*s) for s in slices), strict=True
    ):
        torch.testing.assert_close(ours, torch.stack([one, other]))


@kernels
def test_forward_mode_and_second_derivatives_name_the_reference(kernel: str) -> None:
    q, *others = SMALL.tensors()

    def dual(kernel: str) -> Tensor:
        with forward_ad.dual_level():
            out = attention(kernel)(forward_ad.make_dual(q, torch.ones_like(q)), *others)
            return forward_ad.unpack_dual(out).tangent

    def second(kernel: str) -> Tensor:
        leaf = q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(attention(kernel)(leaf, *others).sin().sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    for way in (dual, second):
        with pytest.raises(RuntimeError, match="use implementation='reference', which has them"):
            way(kernel)
        assert way("reference").isfinite().all()


def test_inputs_of_any_strides_will_do() -> None:
    case = random_sinks(20, documents=True)
    q, k, v, *rest = case.tensors()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    for kernel in KERNELS:
        torch.testing.assert_close(case.of(q, k, v, *rest).attend(kernel), case.attend("reference"))


CONDITIONED = {
    "gaussian": lambda: ba.ConditionedGaussian(4, 6, hidden=5),
    "profiles in a window": lambda: ba.ProfileBank(4, 6, rank=3, extent=9) * ba.Window(4, 14),
    "fire": lambda: ba.Fire(4, 16, hidden=5),
}


@kernels
@pytest.mark.parametrize("family", CONDITIONED)
@pytest.mark.parametrize("documents", [False, True])
def test_sinks_over_a_conditioned_prior_are_the_reference(kernel: str, family: str, documents: bool) -> None:
    sinks = ba.Sinks(CONDITIONED[family](), 3, init=0.3).double()
    ids = torch.arange(33).expand(2, -1) // 12 if documents else None
    tensors = [torch.randn(2, heads, 33, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    states = torch.randn(2, 33, 6, dtype=torch.float64, requires_grad=True)
    given_to_prior = torch.arange(33)[None] if family == "fire" else states
    learned = [*tensors, *([] if family == "fire" else [states]), *sinks.parameters()]
    results = []
    for way in ("reference", kernel):
        out, lse = ba.attention_with_lse(
            *tensors,
            sinks.given(given_to_prior),
            query_scale=ba.ScalableSoftmax(4).double(),
            document_ids=ids,
            implementation=way,
        )
        results.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), learned)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_the_other_keys_have_the_log_prior_of_the_conditioned_prior() -> None:
    q, k = torch.randn(2, 1, 4, 20, 8)
    sinks, states = ba.Sinks(ba.ConditionedGaussian(4, 6), 3, init=0.3), torch.randn(1, 20, 6)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    by_distance = sinks.given(states).prior.log_prior(torch.arange(20))
    bias = by_distance.gather(-1, (i - j).clamp(min=0).expand(1, 4, -1, -1))
    bias[..., :3] = 0.3
    logits = (q @ k.mT / 8**0.5 + bias).masked_fill(j > i, -torch.inf)
    torch.testing.assert_close(ba.posterior(q, k, sinks.given(states)), logits.softmax(-1))


def test_a_kernel_without_a_log_sum_exp_is_refused() -> None:
    from bayesattn.attention.kernels import blockwise, registry

    def without(problem: ba.Problem) -> ba.Solution:
        return blockwise.forward(problem)._replace(lse=None)

    q = torch.randn(1, 2, 6, 4)
    registry._KERNELS["test without lse"] = ba.Kernel(without, differentiable=True)
    try:
        with pytest.raises(ValueError, match="returns no log-sum-exp, which sinks need"):
            ba.bayesian_attention(q, q, q, ba.Sinks(ba.Laplace(2)), implementation="test without lse")
    finally:
        del registry._KERNELS["test without lse"]
