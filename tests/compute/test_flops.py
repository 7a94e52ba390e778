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

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip
CONFIGS: list[PreTrainedConfig] = [
    LlamaConfig(**SIZES, num_key_value_heads=2),
    MistralConfig(**SIZES, num_key_value_heads=1, head_dim=32),
    Qwen2Config(**SIZES, num_key_value_heads=2),
    Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500, n_positions=256),
    GPTNeoXConfig(**SIZES),
    OPTConfig(
        hidden_size=64, ffn_dim=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=500, word_embed_proj_dim=64
    ),
    BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=500),
    ba.BamConfig(**SIZES, num_key_value_heads=2, scalable_softmax=True),
    ba.BamConfig(**SIZES, reading_layers=2, hindsight=4),
    ba.BamConfig(**SIZES, reading_layers=2, hindsight=4, hindsight_heads=[1]),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_counts_are_those_of_the_real_model(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = ba.BamForCausalLM(config) if isinstance(config, ba.BamConfig) else AutoModelForCausalLM.from_config(config)
    architecture = from_config(config)
    assert architecture.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.003)
    if isinstance(config, ba.BamConfig):
        return  # its kernels compute in blocks, some of them in vain
    ids = torch.randint(0, 500, (2, 96))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert training_flops(architecture, ids.numel(), 96, causal=False) == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )


def test_keys_made_with_and_without_hindsight_are_projected_twice() -> None:
    some, every = (
        from_config(ba.BamConfig(**SIZES, reading_layers=2, hindsight=4, hindsight_heads=h)) for h in ([1], None)
    )
    assert some.parameters == every.parameters
    assert matmul_flops(some) - matmul_flops(every) == 2 * 2 * 2 * 64 * 64  # keys and values, two layers


def test_a_published_model_is_counted_to_the_digit() -> None:
    llama = Architecture("llama-3.1-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256)
    assert round(llama.parameters / 1e9, 2) == 405.85


def test_recomputing_documents_and_causality() -> None:
    llama = from_config(LlamaConfig(**SIZES))
    once = training_flops(llama, 1000, 512)
    assert training_flops(llama, 1000, 512, recompute=True) == pytest.approx(once * 4 / 3)
    assert training_flops(llama, 1000, 512, document=100) == training_flops(llama, 1000, 100)
    assert training_flops(llama, 1000, 512, causal=False) > once
    assert training_memory(llama, 1000)["activations"] > training_memory(llama, 1000, recompute=True)["activations"]


def test_a_configuration_that_lacks_a_size_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="the configuration of mine has no hidden_size; it is needed to count FLOPs"):
        from_config({"num_attention_heads": 2}, "mine")
    with pytest.raises(ValueError, match="layers of mine is 0; it must be a whole number of at least 1"):
        from_config(LlamaConfig(**SIZES | {"num_hidden_layers": 0}), "mine")
