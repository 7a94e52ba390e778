"""Inkling's attention is ours under a `ProfileBank`: against the layer of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.studies.bench.conditioned.inkling import make_layer, with_ours, with_transformers

# Smaller than the context, so that windows cut, profiles end and the temperature grows within it.
SIZES: dict[str, Any] = {
    "heads": 8, "head_size": 16, "sliding_window_size": 7, "rel_extent": 20, "log_scaling_n_floor": 10,
}  # fmt: skip
layers = pytest.mark.parametrize("kind", ["full", "sliding"])


@layers
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("tokens", [1, 5, 63])
def test_a_layer_of_inkling_is_attention_under_a_profile_bank(kind: str, key_heads: int, tokens: int) -> None:
    layer = make_layer(kind, seed=tokens, key_heads=key_heads, **SIZES)
    hidden = torch.randn(2, tokens, 128)
    expected = with_transformers(layer, hidden)
    torch.testing.assert_close(with_ours(layer, hidden), expected, atol=1e-5, rtol=0)


@layers
def test_its_weights_get_the_gradients_that_transformers_gives_them(kind: str) -> None:
    layer = make_layer(kind, seed=0, key_heads=2, **SIZES)
    hidden = torch.randn(2, 63, 128, requires_grad=True)
    trainable = [hidden, *layer.parameters()]
    ours, theirs = (_gradients(run(layer, hidden), trainable) for run in (with_ours, with_transformers))
    assert all(gradient.any() for gradient in theirs)
    for mine, gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)


def test_without_a_floor_there_is_no_temperature() -> None:
    layer = make_layer("full", seed=0, **{**SIZES, "log_scaling_n_floor": None})
    hidden = torch.randn(1, 40, 128)
    torch.testing.assert_close(with_ours(layer, hidden), with_transformers(layer, hidden), atol=1e-5, rtol=0)


@layers
def test_the_bias_of_transformers_is_the_log_prior_of_a_profile_bank(kind: str) -> None:
    layer = make_layer(kind, seed=0, **SIZES)
    mixture = layer.r_proj(torch.randn(1, 30, 128)).unflatten(-1, (8, -1))
    position = torch.arange(30)
    bias = layer.rel_logits_proj(mixture, position, position)  # what transformers writes out
    given = ba.GivenPrior(ba.ProfileBank, 8, mixture.transpose(1, 2), (layer.rel_logits_proj.proj[None],))
    distance = position[:, None] - position
    rows = given.log_prior(torch.arange(-29, 30))  # of each query at every distance
    expected = rows.gather(-1, (distance + 29).expand(1, 8, -1, -1))
    torch.testing.assert_close(expected, bias)


def _gradients(out: Tensor, trainable: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return torch.autograd.grad((out * weights).sum(), trainable)
