"""BLOOM, MPT and Falcon with ALiBi: the same weights, with their slopes as a prior."""

from __future__ import annotations

from typing import Any

import torch

from bayesattn.errors import UserError, cut
from bayesattn.models.alibi.attention import make_prior
from bayesattn.models.alibi.configuration import (
    BayesBloomConfig,
    BayesFalconConfig,
    BayesMptConfig,
)
from bayesattn.models.loading import CONVERTED_MODELS

CONFIGURATIONS: dict[str, Any] = {"bloom": BayesBloomConfig, "mpt": BayesMptConfig, "falcon": BayesFalconConfig}
# Starts of names of weights there and here.
_PLACES = {
    "bloom": {
        "transformer.word_embeddings_layernorm.": "model.embedding_norm.",
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
    },
    "mpt": {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.blocks.": "model.layers.",
        "transformer.norm_f.": "model.norm.",
    },
    "falcon": {
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
    },
}
# Where a configuration says how long training contexts were; that of BLOOM is not a setting of transformers.
_LENGTHS = {"bloom": "seq_length", "mpt": "max_seq_len", "falcon": "max_position_embeddings"}
# What a configuration says about its files or the class of the model; and `use_cache`, which is ours to choose.
_NOT_SETTINGS = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "use_cache")


def convert_alibi(source: Any, prior: str = "laplace") -> Any:
    """A model of ours with the weights of a BLOOM, MPT or Falcon of transformers; they are shared, not copied.

    Args:
        source: the causal model.
        prior: `laplace` for learned slopes, `bam` for generalized Gaussians that start as them.

    Raises:
        UserError: another model, one without ALiBi, or with settings that no prior expresses.
    """
    kind = source.config.model_type
    config_class = CONFIGURATIONS[kind]
    settings = {key: value for key, value in source.config.to_dict().items() if key not in _NOT_SETTINGS}
    settings |= {"prior": prior, "training_length": settings.get(_LENGTHS[kind], config_class.training_length)}
    try:
        config = config_class(**settings)
    except UserError as problem:
        raise UserError(f"this {kind} cannot be converted: {cut(problem, 220)}") from problem
    weights = {_our_name(kind, name): value for name, value in source.state_dict().items()}
    for layer in range(config.num_hidden_layers):
        place = f"model.layers.{layer}.{'attn' if kind == 'mpt' else 'self_attention'}.own_prior."
        weights |= {place + name: value for name, value in make_prior(config).state_dict().items()}
    with torch.device("meta"):
        model = CONVERTED_MODELS[config.model_type](config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if source.can_generate():
        model.generation_config = source.generation_config
        model.generation_config.use_cache = True
    return model.eval()


def notes(source: Any) -> list[str]:
    """Where the source differs from its own formula, one sentence each."""
    config = source.config
    if config.model_type == "mpt" and config.attn_config.alibi_bias_max != 8:
        return [
            f"transformers computes MPT with alibi_bias_max 8; the slopes here are those of its configuration, "
            f"{config.attn_config.alibi_bias_max}, so the logits differ"
        ]
    if config.model_type == "falcon":
        return ["transformers rounds Falcon's bias to bfloat16; here it is a line in float32, so far keys differ"]
    return []


def _our_name(kind: str, name: str) -> str:
    for there, here in _PLACES[kind].items():
        if name.startswith(there):
            return here + name.removeprefix(there)
    return name
