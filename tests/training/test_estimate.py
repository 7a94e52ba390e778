from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.training.augmentation import augmented
from bayesattn.training.estimate import estimate, negative_keys
from bayesattn.training.recipe import Augmentation, Recipe, Training, load_recipe

PAPER = Path(__file__).parents[2] / "recipes" / "paper-l12.yaml"


def test_the_published_model_is_built_and_counted() -> None:
    result = estimate(load_recipe(PAPER), hardware="h100", devices=8, mfu=0.4)
    assert 120.5e6 < result.parameters < 121.5e6
    assert result.prior_parameters == 384
    assert result.vocabulary == 32_768
    assert result.tokens_per_step == 589_824
    # 6 FLOPs a weight and token, and attention: 12 · layers · width · mean distance
    assert result.flops == pytest.approx(
        result.tokens * (6 * (result.parameters - 32_768 * 768) + 12 * 12 * 768 * 256.5), rel=1e-3
    )
    assert result.hours == pytest.approx(result.flops / (8 * 0.4 * 989e12) / 3600)
    assert 5e9 < sum(result.memory.values()) < 80e9


def test_keys_of_in_batch_negatives_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many products as training does, over all sizes that a group may have."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    config = ba.BamConfig(**sizes, training_length=30, scalable_softmax=[False, [True, True, False, True]])
    ids = torch.randint(0, 99, (8, 30))
    model = ba.BamForCausalLM(config).train()
    done = [flops_of(model, ids)]
    with augmented(model, Augmentation(in_batch_negatives=7)):
        for power in range(4):
            monkeypatch.setattr(torch, "randint", lambda *_, power=power: torch.tensor(power))
            done.append(flops_of(model, ids))
    average, most = negative_keys(config, 7)
    assert 4 * config.head_dim * average * ids.numel() == sum(done[1:]) / 4 - done[0]
    assert 4 * config.head_dim * most * ids.numel() == done[-1] - done[0]
    assert negative_keys(config, 0) == (0, 0)
    plain, with_negatives = (estimate(Recipe("mine", augmentation=Augmentation(in_batch_negatives=n))) for n in (0, 7))
    assert with_negatives.flops > plain.flops
    assert with_negatives.attention_share > plain.attention_share
    assert with_negatives.memory["activations"] > plain.memory["activations"]
    half = estimate(Recipe("mine", training=Training(precision="bf16")))
    assert plain.memory["activations"] == 2 * half.memory["activations"]


def flops_of(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    return counter.get_total_flops()


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
        ({"mfu": 1.5}, "devices is 1 and mfu 1.5; at least 1 device and 0 < mfu ≤ 1 are needed"),
        ({"expected": {"prior_parameters": 5}}, "the recipe expects 5 prior_parameters and its model has 24"),
        ({"expected": {"parameters": 10**9}}, "the recipe expects 1,000,000,000 parameters and its model has"),
    ],
)
def test_what_makes_no_sense_gets_one_sentence(settings: dict[str, object], sentence: str) -> None:
    recipe = Recipe("mine", expected=settings.pop("expected", {}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        estimate(recipe, **settings)  # type: ignore[arg-type]


def test_an_estimate_needs_no_accelerate() -> None:
    code = "import sys; sys.modules['accelerate'] = sys.modules['peft'] = None; import bayesattn.training.estimate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
