"""What is not finite, or too large, is never mixed in without a word: NaN where it is seen, an error, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.attention.cases import KERNELS

everywhere = pytest.mark.parametrize("kernel", ["reference", *KERNELS])
BROKEN = [torch.nan, torch.inf, -torch.inf]
IDS = torch.arange(40)[None] // 10


def inputs(**kinds: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 40, 8, requires_grad=True, **kinds) for _ in range(3)]


def broken_copies(tensors: list[Tensor], which: str, position: int, value: float) -> list[Tensor]:
    copies = [x.detach().clone() for x in tensors]
    copies["qkv".index(which)][0, 1, position, 3] = value
    return [x.requires_grad_() for x in copies]


SETTINGS: dict[str, tuple[dict[str, Any], range]] = {  # and the queries of head 1 that see key 25
    "causal": ({"log_prior": ba.Laplace(2)}, range(25, 40)),
    "window": ({"log_prior": ba.Window(2, 4)}, range(25, 29)),
    "documents": ({"document_ids": IDS}, range(25, 30)),
    "both sides": ({"log_prior": ba.Window(2, 3), "causal": False}, range(23, 28)),
    "scaled": ({"log_prior": ba.GeneralizedGaussian(2, "alibi"), "query_scale": ba.ScalableSoftmax(2)}, range(25, 40)),
}


@everywhere
@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(("settings", "rows"), SETTINGS.values(), ids=SETTINGS)
def test_a_key_that_is_not_finite_makes_nan_of_the_queries_that_see_it(
    kernel: str, value: float, which: str, settings: dict[str, Any], rows: range
) -> None:
    tensors = inputs()
    expected = ba.bayesian_attention(*tensors, **settings, implementation=kernel)
    out = ba.bayesian_attention(*broken_copies(tensors, which, 25, value), **settings, implementation=kernel)
    seen = torch.zeros(1, 2, 40, dtype=torch.bool)
    seen[0, 1, rows.start : rows.stop] = True
    assert out[seen].isnan().all()
    torch.testing.assert_close(out[~seen], expected[~seen])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_future_key_that_is_not_finite_changes_no_gradient_of_earlier_queries(kernel: str, compiled: bool) -> None:
    prior = ba.Laplace(2, learned=True)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ba.bayesian_attention(q, k, v, prior, implementation=kernel)[:, :, :25].sin().sum()

    tensors = inputs()
    expected = torch.autograd.grad(loss(*tensors), [*tensors, prior.slopes])
    broken = broken_copies(tensors, "k", 30, torch.nan)
    way = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    torch.testing.assert_close(torch.autograd.grad(way(*broken), [*broken, prior.slopes]), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_through_what_is_not_finite_is_nan(kernel: str) -> None:
    broken = broken_copies(inputs(), "k", 30, torch.nan)
    (gradient,) = torch.autograd.grad(ba.bayesian_attention(*broken, implementation=kernel).sum(), broken[0])
    assert gradient[0, 1, 30:].isnan().any()
    assert gradient[0, 0].isfinite().all()


@everywhere
@pytest.mark.parametrize("size", [1e15, 1e18, 3e38])
def test_the_future_stays_hidden_however_large_it_is(kernel: str, size: float) -> None:
    q, k, v = (x.detach() for x in inputs())
    q[0, 0, :-1] = 1.0
    q[0, 0, -1] = 0.0
    k[0, 0, -1] = size  # the last key, which the last query alone sees
    v[0, 0, -1] = 1e6
    try:
        out = ba.bayesian_attention(q, k, v, implementation=kernel)
    except ValueError as refusal:
        assert "logits may reach" in str(refusal)  # noqa: PT017
        return
    assert out[0, 0, :-1].abs().max() < 100


@everywhere
def test_padding_may_hold_anything(kernel: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    ids = torch.where(torch.arange(40) < 7, -1, 0)[None]
    expected = ba.bayesian_attention(q, k, v, document_ids=ids, implementation=kernel)
    for value in (torch.nan, torch.inf, 3e38):
        for x in (q, k, v):
            x[:, :, :7] = value
        out = ba.bayesian_attention(q, k, v, document_ids=ids, implementation=kernel)
        torch.testing.assert_close(out, expected)


HUGE: dict[str, dict[str, Any]] = {
    "query_scale": {"query_scale": torch.full((2, 40), 1e38)},
    "softmax_scale": {"softmax_scale": 1e38},
    "query_scale of a steep prior": {"log_prior": torch.full((2, 40), -1e27), "query_scale": torch.full((2, 40), 1e3)},
}


@everywhere
@pytest.mark.parametrize("queries", [40, 1])
@pytest.mark.parametrize("settings", HUGE.values(), ids=HUGE)
def test_logits_too_large_are_refused(kernel: str, queries: int, settings: dict[str, Any]) -> None:
    q, k, v = (1e3 * x.detach() for x in inputs())
    settings = {**settings}
    if "query_scale" in settings:
        settings["query_scale"] = settings["query_scale"][:, :queries]
    try:
        out = ba.bayesian_attention(q[:, :, :queries], k, v, **settings, implementation=kernel)
    except ValueError as refusal:
        assert "at most 1e+29 is allowed" in str(refusal)  # noqa: PT017
        assert len(str(refusal)) <= 300  # noqa: PT017
        return
    assert queries == 1  # nothing is masked there, and it is what the reference computes in float64
    exact = ba.bayesian_attention(
        q[:, :, :1].double(), k.double(), v.double(), **{
            name: x.double() if isinstance(x, Tensor) else x for name, x in settings.items()
        }, implementation="reference",
    )  # fmt: skip
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1.0)


@everywhere
def test_a_steep_prior_with_a_large_scale_is_not_refused(kernel: str) -> None:
    prior = ba.GeneralizedGaussian.from_shape([-1.0, 12.0], [1.0, 0.01])  # as steep as the family gets
    q, k, v = (x.detach() for x in inputs())
    out = ba.bayesian_attention(q, k, v, prior, query_scale=ba.ScalableSoftmax(2, init=50.0), implementation=kernel)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_looked_at_too(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    out = ba.bayesian_attention(*broken_copies(tensors, "v", 30, torch.nan))
    assert out[0, 1, 30:].isnan().all()
    assert out[0, 1, :30].isfinite().all()


@everywhere
@pytest.mark.parametrize("queries", [1, 3])
def test_a_query_that_is_not_finite_gets_nan_and_no_other_does(kernel: str, queries: int) -> None:
    q, k, v = (x.detach() for x in inputs())
    q = q[:, :, -queries:].clone()
    expected = ba.bayesian_attention(q, k, v, implementation=kernel)
    for value in BROKEN:
        q[0, 1, -1, 3] = value
        out = ba.bayesian_attention(q, k, v, implementation=kernel)
        assert out[0, 1, -1].isnan().all()
        torch.testing.assert_close(out[:, :, :-1], expected[:, :, :-1])
        torch.testing.assert_close(out[0, 0], expected[0, 0])


@everywhere
@pytest.mark.parametrize("which", ["k", "v"])
def test_one_query_never_gets_an_infinite_answer(kernel: str, which: str) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        q, k, v = (x.detach() for x in broken_copies(inputs(), which, 20, value))
        out = ba.bayesian_attention(q[:, :, -1:], k, v, implementation=kernel)
        assert not out.isinf().any()
        if which == "v" or value != value:
            assert out[0, 1].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_forward_answers_backward_differentiates(kernel: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    q = (1e16 * q[:, :, -1:]).requires_grad_()  # one query sees every key: its logits may be as large as they like
    k = (1e16 * k).requires_grad_()
    ours = torch.autograd.grad(ba.bayesian_attention(q, k, v, implementation=kernel).sum(), [q, k])
    expected = torch.autograd.grad(ba.bayesian_attention(q, k, v, implementation="reference").sum(), [q, k])
    torch.testing.assert_close(ours, expected)
