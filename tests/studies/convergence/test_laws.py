from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.studies.convergence.laws import LAWS, Head, Sphere, bessel_ratio, gaussian, mixture, sphere


@pytest.mark.parametrize("name", list(LAWS))
def test_tokens_have_the_covariance_of_the_law(name: str) -> None:
    law = LAWS[name](6, 0.2)
    tokens = law.draw(200_000, torch.Generator().manual_seed(1)).double()
    assert tokens.shape == (200_000, 6)
    assert torch.allclose(torch.cov(tokens.T), law.covariance(), atol=0.01)


@pytest.mark.parametrize("name", list(LAWS))
@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_attention_over_many_tokens_is_the_tilted_mean(name: str, strength: float) -> None:
    law = LAWS[name](5, 0.3)
    tokens = law.draw(1_000_000, torch.Generator().manual_seed(2)).double()
    b = strength * torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weights = (b @ tokens.T).softmax(-1)
    effective = 1 / (weights**2).sum(-1)
    error = (weights @ tokens - law.tilted_mean(b)).norm(dim=-1)
    assert (error < 5 * math.sqrt(5 * 0.6) / effective.sqrt()).all()


def test_a_mixture_of_one_is_a_gaussian() -> None:
    one = mixture(4, components=1)
    b = torch.randn(7, 4, dtype=torch.float64)
    assert torch.allclose(one.tilted_mean(b), one.means[0].double() + 0.1 * b)


def test_bessel_ratios_are_known_for_half_orders() -> None:
    x = torch.tensor([1e-6, 0.3, 1.0, 7.0, 60.0, 400.0], dtype=torch.float64)
    assert torch.allclose(bessel_ratio(0.5, x), torch.tanh(x))  # I_{1/2} / I_{−1/2}
    assert torch.allclose(bessel_ratio(1.5, x[1:]), 1 / torch.tanh(x[1:]) - 1 / x[1:])


def test_bessel_ratios_have_their_gradient() -> None:
    x = torch.tensor([0.2, 1.5, 30.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bessel_ratio(4.0, x), (x,))


def test_a_query_without_preference_gets_the_mean() -> None:
    assert torch.allclose(Sphere(3, 2.0).tilted_mean(torch.zeros(1, 3)), torch.zeros(1, 3, dtype=torch.float64))


def test_the_horizon_is_the_norm_of_the_whitened_form() -> None:
    head, law = Head.random(8, 0), gaussian(8, 0.1)
    a = head.key.double().T @ head.query.double() / 8**0.5
    assert head.horizon(law, 3.0) == pytest.approx(0.3 * float(torch.linalg.matrix_norm(a, 2)), rel=1e-4)


@pytest.mark.parametrize("name", list(LAWS))
def test_moments_of_the_limit_are_those_of_attention_over_many_tokens(name: str) -> None:
    law, head = LAWS[name](4, 0.5), Head.random(4, 1)
    generator = torch.Generator().manual_seed(5)
    keys, x = law.draw(20_000, generator).double(), law.draw(1_000, generator).double()
    logits = 2.0 * x @ head.bilinear.T @ keys.T
    out = logits.softmax(-1) @ keys @ head.value.double().T
    mean, covariance = head.limit_moments(law, 2.0)
    scale = float(covariance.diagonal().sum()) ** 0.5
    assert (out.mean(0) - mean).norm() < 0.15 * scale
    assert (torch.cov(out.T) - covariance).norm() < 0.15 * scale**2


@pytest.mark.parametrize("law", [gaussian, sphere, mixture])
@pytest.mark.parametrize("dimension", [1, 4097])
def test_impossible_dimensions_get_one_sentence(law: Callable[[int], object], dimension: int) -> None:
    with pytest.raises(UserError, match=f"the dimension of tokens is {dimension}; 2 to 4096 are allowed"):
        law(dimension)
