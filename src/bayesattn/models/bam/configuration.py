"""The settings of a BAM model: the network, its initial values, and the length it was trained on."""

# No `from __future__ import annotations`: `strict` checks real types and not strings.
import dataclasses
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bayesattn.errors import no_setting
from bayesattn.models.shipped import resolve

PRIORS = ("bam", "alibi", "nope", "window", "kerple", "t5")
# Encodings that are not priors: they change queries, keys or embeddings, and the prior is uniform.
NON_PRIORS = ("rope", "sinusoidal")

# Allowed keys of `rope_parameters`; transformers ignores unknown ones.
ROPE_SETTINGS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip

# Settings of earlier versions, and where they are now.
MOVED = {
    "crowd": "augmentation.in_batch_negatives of a recipe",
    "temperature_jitter": "augmentation.temperature_jitter of a recipe",
    "reading_layers": "cross_layers of a delayed_keys model",
    "hindsight": "key_delay of a delayed_keys model",
    "hindsight_heads": "delayed_heads of a delayed_keys model",
}

# Settings of the other model type, which transformers would accept here and ignore.
DELAYED_KEYS_SETTINGS = ("cross_layers", "key_delay", "delayed_heads")

_PAPER = {"vocab_size": 32_768, "num_attention_heads": 16, "training_length": 512}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "training_length": 128},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "training_length": 128},
    "l6": {**_PAPER, "hidden_size": 512, "num_hidden_layers": 6},
    "l8": {**_PAPER, "hidden_size": 768, "num_hidden_layers": 8},
    "l12": {**_PAPER, "hidden_size": 768, "num_hidden_layers": 12},
    "l15": {**_PAPER, "hidden_size": 1152, "num_hidden_layers": 15},
    "l18": {**_PAPER, "hidden_size": 1536, "num_hidden_layers": 18},
    "l24": {**_PAPER, "hidden_size": 2048, "num_hidden_layers": 24},
}


@strict
class BamConfig(PreTrainedConfig):
    """A decoder of pre-norm RMSNorm, SwiGLU and Bayesian attention, without biases."""

    model_type = "bam"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 1024
    """Tokens of the vocabulary."""
    hidden_size: int = 128
    """Size of the hidden states."""
    intermediate_size: int | None = None
    """Width of the SwiGLU layer; twice the hidden size by default."""
    num_hidden_layers: int = 3
    """Number of layers."""
    num_attention_heads: int = 4
    """Number of query heads in each layer."""
    num_key_value_heads: int | None = None
    """Number of key/value heads. It must divide the number of heads, and is equal by default."""
    head_dim: int | None = None
    """Size of a head; hidden size / heads by default."""

    position: str = "bam"
    """Positional encoding. Priors: `bam` (learned generalized Gaussian), `alibi`, `nope` (uniform), `window`, `kerple`,
    `t5`. Others: `rope`, `sinusoidal`."""
    prior_init: str | list[list[list[float | int]]] = "zeros"
    """For `bam`: `zeros`, `alibi`, `spread`, or [beta, scale in tokens] of each head of each layer."""
    prior_epsilon: float | int = 1e-5
    """For `bam`: 1e-5 as published; 1 lets a retrieval head still see its own token."""
    learn_centre: bool = False
    """For `bam`: whether the centres of the priors are learned too."""
    share_prior: bool = False
    """One prior for all layers."""
    window: int | list[int] = 128
    """For `window`: keys that a query sees, one number or one for each head."""
    rope_parameters: dict[str, Any] | None = None
    """For `rope`: as for other models of transformers, `rope_type` and its factors included."""

    scalable_softmax: bool | list[bool | list[bool]] = True
    """Heads with Scalable Softmax: all, none, or for each layer true, false, or a list with one entry for each head."""
    learned_temperature: bool = False
    """Whether layers without Scalable Softmax learn a constant temperature for each head. In a layer where some heads
    have Scalable Softmax, the others always learn one."""
    temperature_init: float | int = 1.0
    """Start value of s in Scalable Softmax, and of the constant temperatures."""
    scale_prior: bool = True
    """Whether temperatures multiply the prior too, or the content alone."""
    qk_norm: bool = False
    """Whether queries and keys are normalised. Then no content logit exceeds √head_dim."""

    rms_norm_eps: float | int = 1e-6
    """Epsilon of RMSNorm."""
    initializer_range: float | int = 0.02
    """Standard deviation of new weights; it also scales sinusoidal positions."""
    tie_word_embeddings: bool = False
    """Whether the output layer shares its weights with the embeddings."""
    training_length: int = 128
    """Tokens of a training context. Evaluations give lengths as multiples of it."""
    max_position_embeddings: int | None = None
    """For `rope`: the length that its scaling methods start from; the training length by default."""
    tolerance: float | int = 1e-6
    """Posterior mass per query and layer that inference may leave out."""
    use_cache: bool = False
    """Whether a plain call returns a cache. `generate()` uses one in any case."""
    bos_token_id: int | None = None
    """The token before a text."""
    eos_token_id: int | list[int] | None = None
    """The token, or tokens, at which generation ends."""
    pad_token_id: int | None = None
    """The padding token."""

    def __post_init__(self, **kwargs: Any) -> None:
        for name, place in MOVED.items():
            if name in kwargs:
                raise ValueError(f"the setting {name} is of an earlier version; it is now {place}")
        for name in DELAYED_KEYS_SETTINGS:
            if name in kwargs:
                raise ValueError(f"{name} is a setting of DelayedKeysConfig; {type(self).__name__} does not have it")
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % max(1, self.num_attention_heads):
                raise ValueError(f"hidden_size {self.hidden_size} does not divide by {self.num_attention_heads} heads")
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        if self.max_position_embeddings is None and self.position == "rope":
            self.max_position_embeddings = self.training_length
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Also takes the name of a shipped model. `from_pretrained` reads this."""
        return super().get_config_dict(resolve(pretrained_model_name_or_path), **kwargs)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "BamConfig":
        """`tiny`, `small`, or the paper's `l6`, `l8`, `l12`, `l15`, `l18`, `l24`; any setting can be changed."""
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        known = [f.name for f in dataclasses.fields(cls)]
        if moved := [key for key in changes if key in MOVED]:
            raise ValueError(f"the setting {moved[0]} is of an earlier version; it is now {MOVED[moved[0]]}")
        if unknown := [key for key in changes if key not in known]:
            raise ValueError(no_setting("model", unknown[0], known))
        return cls(**{**PRESETS[name], **changes})

    def scalable_heads(self) -> list[list[bool]]:
        """Whether each head has Scalable Softmax, by layer."""
        layers = self.scalable_softmax
        if isinstance(layers, bool):
            layers = [layers] * self.num_hidden_layers
        heads = [[layer] * self.num_attention_heads if isinstance(layer, bool) else layer for layer in layers]
        if [len(layer) for layer in heads] != [self.num_attention_heads] * self.num_hidden_layers:
            raise ValueError(
                f"scalable_softmax must be true, false, or one of these or a list of {self.num_attention_heads} for "
                f"each of {self.num_hidden_layers} layers"
            )
        return heads

    def _check(self) -> None:
        """Raise an error for settings that do not fit together."""
        if self.position not in PRIORS + NON_PRIORS:
            raise ValueError(f"position is {self.position!r}; allowed are {', '.join(PRIORS + NON_PRIORS)}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "training_length")
        for name in (*sizes, "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("prior_epsilon", "temperature_init", "rms_norm_eps", "initializer_range"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; a positive number is needed")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}; 0 ≤ tolerance < 1 is needed")
        windows = [self.window] * self.num_attention_heads if isinstance(self.window, int) else self.window
        if min(windows, default=0) < 1:
            raise ValueError(f"window is {self.window}; at least 1 key is needed")
        if len(windows) != self.num_attention_heads:
            raise ValueError(f"window has {len(windows)} numbers and the model {self.num_attention_heads} heads")
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"there are {self.num_attention_heads} heads and {self.num_key_value_heads} key/value heads; the "
                "latter must divide the former"
            )
        self.scalable_heads()
        self._check_prior_init()
        self._check_rope()

    def _check_prior_init(self) -> None:
        if isinstance(self.prior_init, list):
            shape = [[len(head) for head in layer] for layer in self.prior_init]
            layers = 1 if self.share_prior else self.num_hidden_layers
            if shape != [[2] * self.num_attention_heads] * layers:
                where = "the one prior that layers share" if self.share_prior else f"each of {layers} layers"
                raise ValueError(
                    f"prior_init must be [beta, scale] for each of {self.num_attention_heads} heads in {where}"
                )
            heads = [head for layer in self.prior_init for head in layer]
            if not all(math.isfinite(beta) and 0.0 < scale < math.inf for beta, scale in heads):
                raise ValueError("prior_init has a beta that is not finite, or a scale that is not a positive number")
        elif self.prior_init not in ("zeros", "alibi", "spread"):
            raise ValueError(f"prior_init is {self.prior_init!r}; allowed are zeros, alibi, spread, or a list")

    def _check_rope(self) -> None:
        rope = self.rope_parameters or {}
        for name in rope:
            if name not in ROPE_SETTINGS:
                raise ValueError(no_setting("rope_parameters", name, ROPE_SETTINGS))
        for name, least in {"rope_theta": 0.0, "factor": 1.0}.items():
            value = rope.get(name, 10_000.0)
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not numeric or not least <= value < math.inf or value == 0:
                needed = f"a number of at least {least:g}" if least else "a positive number"
                raise ValueError(f"{name} of rope_parameters is {value!r}; {needed} is needed")
        if self.position == "rope" and self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; an even number is needed for the position rope")
        rope_type = rope.get("rope_type", "default")
        if self.position == "rope" and rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"rope_type is {rope_type!r}; allowed are default, {', '.join(ROPE_INIT_FUNCTIONS)}")


AutoConfig.register("bam", BamConfig)
