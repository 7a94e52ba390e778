from __future__ import annotations

from pathlib import Path

import pytest

from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.training.estimate import estimate
from bayesattn.training.recipe import Recipe, load_recipe

PAPER = Path(__file__).parents[2] / "recipes" / "paper-l12.yaml"


def test_the_published_model_is_built_and_counted() -> None:
    told = estimate(load_recipe(PAPER), hardware="h100", devices=8, mfu=0.4)
    assert 120.5e6 < told.parameters < 121.5e6
    assert told.prior_parameters == 384
    assert told.vocabulary == 32_768
    assert told.tokens_per_step == 589_824
    # 6 FLOPs a weight and token, and attention: 12 · layers · width · mean distance
    assert told.flops == pytest.approx(
        told.tokens * (6 * (told.parameters - 32_768 * 768) + 12 * 12 * 768 * 256.5), rel=1e-3
    )
    assert told.hours == pytest.approx(told.flops / (8 * 0.4 * 989e12) / 3600)
    assert 5e9 < sum(told.memory.values()) < 80e9


def test_the_published_tokenizer_comes_with_a_package() -> None:
    tokenizer = load_tokenizer("mistral-v3")
    text = "Hello 12345, wörld 🦜"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer) == 32_768
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("12345", add_special_tokens=False)) >= 5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hardware": "h10"}, "there is no hardware 'h10'; did you mean h100?"),
        ({"mfu": 1.5}, "1 devices at a utilisation of 1.5 make no sense"),
        ({"expected": {"prior_parameters": 5}}, "the recipe expects 5 prior_parameters and its model has 24"),
        ({"expected": {"parameters": 10**9}}, "the recipe expects 1,000,000,000 parameters and its model has"),
        ({"expected": {"size": 1}}, "expected has no setting 'size'"),
    ],
)
def test_what_makes_no_sense_gets_one_sentence(settings: dict[str, object], sentence: str) -> None:
    recipe = Recipe("mine", expected=settings.pop("expected", {}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        estimate(recipe, **settings)  # type: ignore[arg-type]
