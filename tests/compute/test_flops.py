from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import bayesattn as ba
from bayesattn.compute.architecture import Architecture, from_config
from bayesattn.compute.flops import matmul_flops, training_flops, training_memory
from bayesattn.errors import UserError
from bayesattn.models.loading import CAUSAL_MODELS

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip
# Parameters that are not counted: norms of queries and keys, two unused positions, a norm of the embeddings.
CASES: list[tuple[PreTrainedConfig, int]] = [
    (LlamaConfig(**SIZES, num_key_value_heads=2), 0),
    (MistralConfig(**SIZES, num_key_value_heads=1, head_dim=32), 0),
    (Qwen2Config(**SIZES, num_key_value_heads=2), 0),
    (Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True), 3 * 2 * 16),
    (GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500, n_positions=256), 0),
    (GPTNeoXConfig(**SIZES), 0),
    (
        OPTConfig(
            hidden_size=64, ffn_dim=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=500,
            word_embed_proj_dim=64,
        ),
        2 * 64,
    ),
    (BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=500), 2 * 64),
]  # fmt: skip
BAM_CONFIGS = [
    ba.BamConfig(**SIZES, num_key_value_heads=2, scalable_softmax=True),
    ba.DelayedKeysConfig(**SIZES, cross_layers=2, key_delay=4),
    ba.DelayedKeysConfig(**SIZES, cross_layers=2, key_delay=4, delayed_heads=[1]),
]


@pytest.mark.parametrize(("config", "uncounted"), CASES, ids=[config.model_type for config, _ in CASES])
def test_counts_are_exactly_those_of_the_real_model(config: PreTrainedConfig, uncounted: int) -> None:
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    architecture = from_config(config)
    assert architecture.parameters + uncounted == sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 500, (2, 96))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert training_flops(architecture, ids.numel(), 96, causal=False) == counter.get_total_flops()


@pytest.mark.parametrize("config", BAM_CONFIGS, ids=["plain", "delayed keys", "delayed keys in one head"])
def test_parameters_of_our_models_are_exact_with_those_of_priors(config: ba.BamConfig) -> None:
    model = CAUSAL_MODELS[config.model_type](config)
    architecture = from_config(config)
    assert architecture.extra > 0
    assert architecture.parameters == sum(p.numel() for p in model.parameters())


def test_keys_with_and_without_a_delay_are_projected_twice() -> None:
    some, every = (
        from_config(ba.DelayedKeysConfig(**SIZES, cross_layers=2, key_delay=4, delayed_heads=h)) for h in ([1], None)
    )
    assert some.parameters == every.parameters
    assert matmul_flops(some) - matmul_flops(every) == 2 * 2 * 2 * 64 * 64  # keys and values, two layers


def test_a_published_model_is_counted_to_the_digit() -> None:
    llama = Architecture("llama-3.1-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256)
    assert llama.parameters == 405_853_388_800


def test_recomputing_documents_and_causality() -> None:
    llama = from_config(LlamaConfig(**SIZES))
    once = training_flops(llama, 1000, 512)
    assert training_flops(llama, 1000, 512, recompute=True) == pytest.approx(once * 4 / 3)
    assert training_flops(llama, 1000, 512, document=100) == training_flops(llama, 1000, 100)
    assert training_flops(llama, 1000, 512, causal=False) > once
    assert training_memory(llama, 1000)["activations"] > training_memory(llama, 1000, recompute=True)["activations"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"num_attention_heads": 2}, "the configuration of mine has no hidden_size; it is needed to count FLOPs"),
        (SIZES | {"num_hidden_layers": 0}, "layers of mine is 0; it must be a whole number of at least 1"),
        (SIZES | {"vocab_size": -1}, "vocab_size of mine is -1; it must be a whole number of at least 1"),
    ],
)
def test_a_bad_configuration_gets_one_sentence(config: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        from_config(config, "mine")
