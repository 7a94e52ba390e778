"""Models of transformers that ours are compared with, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from bayesattn.models.bam.configuration import BamConfig


def llama_like(config: BamConfig) -> Any:
    """A Llama of the same sizes, with random weights and, by default, SDPA."""
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,  # type: ignore[arg-type]
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=1,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=2**17,
    )
    # Set afterwards: LlamaConfig refuses heads that do not divide the hidden size, which the model can have.
    llama.num_attention_heads, llama.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
    return LlamaForCausalLM(llama)
