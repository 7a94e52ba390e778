"""Tiny random models of transformers, each with its own eager attention to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import bayesattn.adapt.backend

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Families, and what their tiny configuration has besides SMALL.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {},
    "GPTNeoX": {},
    "Olmo": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Starcoder2": {},
    "GptOss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}
# The class names that do not start with the family's.
MODELS = {"GPT2": "GPT2LMHeadModel"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def make_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A tiny random model of the family, in evaluation mode, with eager attention."""
    torch.manual_seed(seed)
    config_class = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    model_class = getattr(transformers, MODELS.get(family, f"{family}ForCausalLM"))
    config = config_class(**{**SMALL, **FAMILIES[family], **settings})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("sinks"):  # which are not initialised
                weights.normal_()
            elif weights.dim() > 1 and "embed" not in name and "lm_head" not in name:
                weights.mul_(8)  # as they are, all attention would be nearly uniform
    return model


def tokens(batch: int = 2, length: int = 21) -> Tensor:
    return torch.randint(3, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def padding(x: Tensor, side: str, count: int = 5) -> Tensor:
    """A mask of `x` whose first sequence has so many zeros on this side."""
    mask = torch.ones_like(x)
    mask[0, slice(0, count) if side == "left" else slice(-count, None)] = 0
    return mask


def packed_positions(*lengths: int) -> Tensor:
    """Positions that start again in each document."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def difference(model: Any, call: Callable[[Any], Tensor]) -> float:
    """The largest difference between what `call(model)` gives with `bayesattn` and with eager attention."""
    model.set_attn_implementation("eager")
    wanted = call(model)
    model.set_attn_implementation(bayesattn.adapt.backend.NAME)
    return (call(model) - wanted).abs().max().item()
