"""Our models with rotary positions as models of transformers, which can be extended."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bayesattn.adapt.add_prior import add_prior
from bayesattn.attention import ScalableSoftmax
from bayesattn.errors import UserError
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.priors import Uniform


def as_transformers(model: BamForCausalLM) -> PreTrainedModel:
    """A copy of a model with rotary positions as a Qwen3, or as a Llama if it does not normalise queries and keys.

    Its logits are the same. Temperatures are those of `add_prior`, under a uniform prior.

    Raises:
        UserError: for another encoding, and for sinks.
    """
    config = model.config
    if config.position != "rope" or config.sinks:
        raise UserError(
            f"the positions of the model are {config.position!r}{' with sinks' if config.sinks else ''}; only rotary "
            "positions can be extended, and priors read on by themselves"
        )
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.training_length or config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    made: Any
    made = Qwen3ForCausalLM(Qwen3Config(**settings)) if config.qk_norm else LlamaForCausalLM(LlamaConfig(**settings))
    heads, layers = config.num_attention_heads, model.model.layers
    temperatures: list[Any] = [layer.self_attn.temperature for layer in layers]
    if any(temperatures):
        kept = [
            ScalableSoftmax(heads, grows_with_length=each.grows_with_length.bool().tolist()) for each in temperatures
        ]
        add_prior(made, Uniform(heads), kept, scale_prior=config.scale_prior)
    made.to(next(model.parameters()).dtype)
    missing, unexpected = made.load_state_dict(model.state_dict(), strict=False)
    if unexpected or any(not name.endswith(("q_norm.weight", "k_norm.weight")) for name in missing):
        raise UserError(f"the model has weights that its copy has not, {(unexpected or missing)[0]} among them")
    with torch.no_grad():
        for name, weights in made.named_parameters():
            if name in missing:
                weights.fill_(1)
    return made.to(next(model.parameters()).device).eval()
