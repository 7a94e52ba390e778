from __future__ import annotations

import pytest
import torch

import bayesattn as ba
from bayesattn.studies.bench import inputs
from bayesattn.studies.bench.inputs import Inputs, Shape


@pytest.mark.parametrize("text", ["16x4x128x32", "2x8:2x512x64", "1x8x128x64/4", "3x6:3x100x8/2"])
def test_a_shape_is_printed_as_it_is_read(text: str) -> None:
    assert str(Shape.parse(text)) == text


def test_parts_of_a_shape_are_in_the_order_of_its_fields() -> None:
    assert Shape.parse("2x8:4x512x64/3") == Shape(2, 8, 4, 512, 64, documents=3)
    assert Shape.parse("2x8x512x64") == Shape(2, 8, 8, 512, 64)


@pytest.mark.parametrize(
    "text", [" ", "2x8x512", "0x8x512x64", "2x8:3x512x64", "2x8:0x512x64", "2x8x9x64/10", "2x8x9x4/0"]
)
def test_what_is_no_shape_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Shape.parse(text)


def test_a_shape_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shape.parse("1x2x256x16")
    monkeypatch.setattr(inputs, "device_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match="1x2x256x16"):
        Shape.parse("1x2x256x16")


@pytest.mark.parametrize("text", ["2x4x50x8", "3x4:2x64x8/4"])
def test_visible_pairs_are_those_of_the_posterior(text: str) -> None:
    x = Inputs.make(Shape.parse(text))
    weights = ba.posterior(x.q, x.k, x.prior, document_ids=x.document_ids)
    assert x.visible_pairs() == int((weights[:, 0] > 0).sum())


@pytest.mark.parametrize("text", ["2x4x50x8", "3x4:2x200x8/4"])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_error_is_small_for_our_attention_and_large_for_another(text: str, gradients: bool) -> None:
    x = Inputs.make(Shape.parse(text))
    assert inputs.error(x.attend, x, scaled=True, gradients=gradients) < inputs.LARGEST_ERROR
    assert inputs.error(x.attend, x, scaled=False, gradients=gradients) > 100 * inputs.LARGEST_ERROR


def test_a_gradient_that_is_not_a_number_is_an_error() -> None:
    x = Inputs.make(Shape.parse("2x4x50x8"))

    def attend() -> torch.Tensor:
        nothing = (x.scale.s - x.scale.s.detach()).sum()  # and its square root has an infinite slope
        return x.attend() + 0 * nothing.sqrt()

    assert not inputs.error(attend, x, scaled=True, gradients=True) <= inputs.LARGEST_ERROR


def test_an_error_in_one_gradient_alone_is_seen() -> None:
    x = Inputs.make(Shape.parse("2x4x50x8"))

    def scale_without_gradient() -> torch.Tensor:
        scale = x.scale(torch.arange(1, 51))
        frozen = scale.detach() + 0 * scale
        return ba.bayesian_attention(x.q, x.k, x.v, x.prior, query_scale=frozen)

    assert inputs.error(scale_without_gradient, x, scaled=True, gradients=False) < inputs.LARGEST_ERROR
    assert inputs.error(scale_without_gradient, x, scaled=True, gradients=True) > 0.5
