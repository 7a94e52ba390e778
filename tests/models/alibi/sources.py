"""Small models of transformers with ALiBi and random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, MptConfig

SIZES = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
FALCON = {**SIZES, "hidden_size": 32, "num_attention_heads": 8, "alibi": True}
CONFIGURATIONS: dict[str, Any] = {
    "bloom": BloomConfig(**SIZES),
    "bloom, residual after the norm": BloomConfig(**SIZES, apply_residual_connection_post_layernorm=True),
    "mpt": MptConfig(vocab_size=60, d_model=48, n_heads=6, n_layers=2, max_seq_len=64),
    "mpt, clipped": MptConfig(
        vocab_size=60, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config={"clip_qkv": 0.7, "softmax_scale": 0.3},
    ),
    "falcon-rw": FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon, one key head": FalconConfig(**FALCON, multi_query=True),
    "falcon, new decoder": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon, new decoder, one norm": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    ),
}  # fmt: skip


def make_source(name: str, **changes: Any) -> Any:
    """The model, with weights and biases far from their initial values."""
    torch.manual_seed(0)
    config = type(CONFIGURATIONS[name]).from_dict({**CONFIGURATIONS[name].to_dict(), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread, centre = (0.2, 0.0) if parameter.dim() > 1 else (0.5, 1.0)
            parameter.copy_(centre + spread * torch.randn(parameter.shape))
    return model
