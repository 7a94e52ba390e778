"""The sizes of a decoder that decide its cost, from any Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bayesattn.attention import ScalableSoftmax
from bayesattn.errors import UserError, cut, is_whole, shown
from bayesattn.priors import ConditionedPrior, Prior, Sinks

# Families whose feed-forward network is two plain matrices rather than a gated one of three.
PLAIN_FFN = {"gpt2", "gpt_neo", "gpt_neox", "bloom", "opt", "mpt", "gptj", "phi", "falcon", "starcoder2", "bert"}
# Families that learn an embedding for each position.
LEARNED_POSITIONS = {"gpt2", "opt", "gpt_neo", "bert"}
# Families whose matrices and norms have biases throughout.
BIASED = {"gpt2", "gpt_neox", "bloom", "opt", "phi", "starcoder2"}
# The names that configurations have for each size, the most common one first.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
# The largest sizes; beyond them somebody confused two numbers.
MOST = {
    "layers": 2**12,
    "hidden": 2**20,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_size": 2**16,
    "ffn": 2**22,
    "vocabulary": 2**26,
}


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder.

    Args:
        kv_heads: number of key/value heads.
        ffn: width of the feed-forward network. It has three matrices if `gated`, else two.
        tied: whether the output matrix is the embedding.
        biases: whether all matrices and norms have biases.
        qkv_biases: whether the projections to queries, keys and values have biases, even if others do not.
        positions: number of learned position embeddings, 0 for none.
        beside: additional layers of the same size without a cache, such as the encoder of delayed keys.
        repeated: number of weights that each token is multiplied with a second time.
        extra: parameters outside all matrix products, such as those of priors.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    qkv_biases: bool = False
    positions: int = 0
    beside: int = 0
    repeated: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        for size, most in MOST.items():
            if not is_whole(value := getattr(self, size), 1, most):
                raise UserError(
                    f"{size} of {self.name} is {shown(value)}; it must be a whole number of at least 1 and at most "
                    f"{most:,}"
                )
        for size in ("positions", "beside", "repeated", "extra"):
            if not is_whole(value := getattr(self, size), 0, 2**60):
                raise UserError(f"{size} of {self.name} is {shown(value)}; it must be a whole number of at least 0")

    @property
    def layer_matrices(self) -> int:
        """Number of weights in the matrices of one layer."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that each token is multiplied with: all matrices and the output, not the embedding."""
        return (self.layers + self.beside) * self.layer_matrices + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        embeddings = self.hidden * (self.vocabulary * (1 if self.tied else 2) + self.positions)
        layers = self.layers + self.beside
        norms = (2 * layers + 1) * self.hidden
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        biases = 0
        if self.biases:
            biases = norms + layers * (qkv + 2 * self.hidden + self.ffn * (2 if self.gated else 1))
        elif self.qkv_biases:
            biases = layers * qkv
        return embeddings + layers * self.layer_matrices + norms + biases + self.extra

    @property
    def kv_elements(self) -> int:
        """Number of elements per token in the caches of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size


def from_config(config: Any, name: str | None = None) -> Architecture:
    """From a configuration of transformers, or the contents of a config.json."""
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if isinstance(section := values.get("base_config"), Mapping):  # of a model of transformers that has got priors
        values = {**values, **section}
    if isinstance(inner := values.get("text_config"), Mapping):  # of a model for text and images
        values = {**values, **inner}
    kind = str(values.get("base_model_type") or values.get("model_type", ""))
    name = name or str(values.get("_name_or_path") or kind or "the model")

    def find(size: str, default: int | None = None) -> int:
        for key in NAMES[size]:
            if values.get(key) is not None:
                most = MOST.get(size, 2**40)
                if not is_whole(values[key], 1, most):
                    raise UserError(
                        f"{key} of {name} is {shown(values[key])}; it must be a whole number of at least 1 and at "
                        f"most {most:,}"
                    )
                return int(values[key])
        if default is None:
            raise UserError(f"the configuration of {name} has no {NAMES[size][0]}; it is needed to count FLOPs")
        return default

    hidden, heads, layers = find("hidden"), find("heads"), find("layers")
    extra = _prior_parameters(values, name) if kind in ("bam", "delayed_keys") else 0  # and a check of all settings
    if kind.startswith("bayes_"):  # that of transformers, with a prior in each layer
        kind, extra = kind.removeprefix("bayes_"), layers * heads * (2 if values.get("prior") == "bam" else 1)
    delayed = kind == "delayed_keys" and bool(values.get("key_delay"))
    plain = kind in PLAIN_FFN
    kv_heads = find("kv_heads", 1 if values.get("multi_query") else heads)
    head_size = find("head_size", hidden // max(1, heads))
    # If some heads have delayed keys and some have not, cross layers project both kinds of hidden states.
    both = values.get("cross_layers", 1) if delayed and values.get("delayed_heads") is not None else 0
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=find("ffn", 4 * hidden),
        vocabulary=find("vocabulary"),
        gated=not plain,
        tied=bool(values.get("tie_word_embeddings", kind in PLAIN_FFN)),
        biases=kind in BIASED,
        qkv_biases=kind == "qwen2" or bool(values.get("attention_bias")),
        positions=find("positions", 0) if kind in LEARNED_POSITIONS else 0,
        beside=int(delayed),
        repeated=both * 2 * hidden * kv_heads * head_size,
        extra=extra,
    )


def _prior_parameters(values: Mapping[str, Any], name: str) -> int:
    """Learned parameters of the priors and temperatures of our models, counted in a model without storage."""
    from bayesattn.models.loading import CAUSAL_MODELS

    cls = CAUSAL_MODELS[values["model_type"]]
    try:
        with torch.device("meta"):
            model = cls(cls.config_class.from_dict(dict(values)))
    except Exception as problem:  # a wrong setting gives many kinds of errors
        raise UserError(f"the configuration of {name} is wrong: {cut(problem, 200)}") from problem
    kinds = (Prior, ConditionedPrior, Sinks, ScalableSoftmax)
    parameters = {p for module in model.modules() if isinstance(module, kinds) for p in module.parameters()}
    return sum(p.numel() for p in parameters if p.requires_grad)
