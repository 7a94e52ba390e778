"""Derivatives are right, or one sentence names the implementation that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import bayesattn as ba
from tests.attention.cases import KERNELS, Case, random_case

kernels = pytest.mark.parametrize("kernel", ["auto", *KERNELS])
everywhere = pytest.mark.parametrize("kernel", ["reference", "auto", *KERNELS])
CASE = random_case(7, 9, batch=2, heads=4, kv_heads=2, size=3, documents=True, scaled="batch")


def attention(kernel: str) -> Callable[..., Tensor]:
    return lambda *tensors: Case(*tensors, CASE.settings).attend(kernel)


def loss(kernel: str) -> Callable[..., Tensor]:
    return lambda *tensors: attention(kernel)(*tensors).sin().sum()


@kernels
def test_grad_of_torch_func_is_that_of_the_reference(kernel: str) -> None:
    which = tuple(range(5))
    ours = torch.func.grad(loss(kernel), which)(*CASE.tensors())
    expected = torch.func.grad(loss("reference"), which)(*CASE.tensors())
    torch.testing.assert_close(ours, expected)


@kernels
def test_the_jacobian_by_reverse_mode_is_that_of_the_reference(kernel: str) -> None:
    ours = torch.func.jacrev(attention(kernel), (0, 3))(*CASE.tensors())
    torch.testing.assert_close(ours, torch.func.jacrev(attention("reference"), (0, 3))(*CASE.tensors()))


@everywhere
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, None), (1, None, None, None, 2)], ids=str)
def test_vmap_and_gradients_of_samples_are_a_loop(kernel: str, in_dims: tuple[int | None, ...]) -> None:
    samples = [
        x if dim is None else torch.stack([x, x.sin(), x.cos()], dim)
        for x, dim in zip(CASE.tensors(), in_dims, strict=True)
    ]
    slices = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(samples, in_dims, strict=True)] for i in range(3)
    ]
    together = torch.func.vmap(attention(kernel), in_dims)(*samples)
    torch.testing.assert_close(together, torch.stack([attention(kernel)(*some) for some in slices]))
    gradient = torch.func.grad(loss(kernel), (0, 3))
    for ours, expected in zip(
        torch.func.vmap(gradient, in_dims)(*samples),
        zip(*(gradient(*some) for some in slices), strict=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, torch.stack(expected))


def jvp(kernel: str) -> Tensor:
    tangents = tuple(torch.ones_like(x) for x in CASE.tensors())
    return torch.func.jvp(attention(kernel), tuple(CASE.tensors()), tangents)[1]


def jvp_of_a_frozen_prior(kernel: str) -> Tensor:
    q, *others = CASE.tensors()
    return torch.func.jvp(lambda q: attention(kernel)(q, *others), (q,), (torch.ones_like(q),))[1]


def compiled_jvp(kernel: str) -> Tensor:
    return torch.compile(lambda: jvp_of_a_frozen_prior(kernel), backend="aot_eager")()


def dual_numbers(kernel: str) -> Tensor:
    q, *others = CASE.tensors()
    with forward_ad.dual_level():
        out = attention(kernel)(forward_ad.make_dual(q, torch.ones_like(q)), *others)
        tangent: Tensor = forward_ad.unpack_dual(out).tangent
    return tangent


def hessian(kernel: str) -> Tensor:
    return torch.func.hessian(lambda q: loss(kernel)(q, *CASE.tensors()[1:]))(CASE.q)  # type: ignore[no-any-return]


def gradient_of_a_gradient(kernel: str) -> Tensor:
    q = CASE.q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(kernel)(q, *CASE.tensors()[1:]), q, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), q, allow_unused=True)[0]


WAYS = [jvp, jvp_of_a_frozen_prior, compiled_jvp, dual_numbers, hessian, gradient_of_a_gradient]


@kernels
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_forward_mode_and_second_derivatives_name_the_reference(kernel: str, way: Callable[[str], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="use implementation='reference', which has them") as caught:
        way(kernel)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_reference_has_them(way: Callable[[str], Tensor]) -> None:
    assert way("reference").isfinite().all()
    assert way("reference").abs().max() > 1e-3


def test_forward_mode_of_the_reference_is_the_difference_quotient() -> None:
    q, *others = CASE.tensors()
    direction = torch.randn_like(q)
    step = 1e-6
    quotient = (attention("reference")(q + step * direction, *others) - attention("reference")(q, *others)) / step
    derivative = torch.func.jvp(lambda q: attention("reference")(q, *others), (q,), (direction,))[1]
    torch.testing.assert_close(derivative, quotient, rtol=1e-4, atol=1e-5)


@kernels
def test_one_tensor_as_keys_and_values_compiles(kernel: str) -> None:
    prior = ba.Laplace(4, learned=True)
    q, kv = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(2))

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        return ba.bayesian_attention(q, kv, kv, prior, implementation=kernel)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for way in (attend, compiled):
        gradients = torch.autograd.grad(way(q, kv).sin().sum(), [q, kv, prior.slopes])
        expected = torch.autograd.grad(
            ba.bayesian_attention(q, kv, kv, prior, implementation="reference").sin().sum(), [q, kv, prior.slopes]
        )
        torch.testing.assert_close(gradients, expected)


def test_a_query_scale_of_one_query_compiles_with_lengths_that_change() -> None:
    prior, scale = ba.Laplace(2), ba.ScalableSoftmax(2)
    attend = torch.compile(
        lambda q, k: ba.bayesian_attention(q, k, k, prior, query_scale=scale),
        backend="aot_eager", dynamic=True, fullgraph=True,
    )  # fmt: skip
    for queries, keys in [(1, 4), (5, 8), (1, 9)]:
        q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4)
        torch.testing.assert_close(attend(q, k), ba.bayesian_attention(q, k, k, prior, query_scale=scale))


@kernels
def test_vmap_over_no_slices_is_refused(kernel: str) -> None:
    q = torch.randn(0, 1, 2, 4, 8)
    with pytest.raises(RuntimeError, match=r"torch\.vmap has no slices; at least one is needed"):
        torch.func.vmap(lambda x: ba.bayesian_attention(x, x, x, implementation=kernel))(q)
