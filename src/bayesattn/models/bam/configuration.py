"""The settings of a BAM model: the network, its initial values, and the length it was trained on."""

# No `from __future__ import annotations`: `strict` checks real types and not strings.
import dataclasses
import difflib
from importlib import import_module
from typing import Any, get_args

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bayesattn.errors import is_number, is_whole, no_setting, plain_errors, shown, wrong_type
from bayesattn.models.bam.placement import reader_heads
from bayesattn.models.shipped import resolve
from bayesattn.priors import GeneralizedGaussian
from bayesattn.priors.generalized_gaussian import Initialisation

PRIORS = ("bam", "alibi", "nope", "window", "kerple", "t5")
# Priors that depend on the query: on its hidden state, or for `fire` on its position.
CONDITIONED = ("cabam", "profiles", "fire")
# Encodings that are not priors: they change queries, keys or embeddings, and the prior is uniform.
NON_PRIORS = ("rope", "sinusoidal")
POSITIONS = PRIORS + CONDITIONED + NON_PRIORS

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

# The largest value of each size. What is beyond would not fit into any machine.
LARGEST_SIZES = {
    "vocab_size": 2**26,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 2**20,
    "training_length": 2**40,
    "prior_hidden": 2**16,
    "profile_rank": 2**16,
    "profile_extent": 2**24,
}
LARGEST = {**LARGEST_SIZES, "max_position_embeddings": 2**40}
# Positive numbers are in this range, which float32 has room for.
LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
WIDEST_WINDOW = 2**24
MOST_SINKS = 2**16

_PAPER = {
    "vocab_size": 32_768, "num_attention_heads": 16, "training_length": 512, "rms_norm_eps": 1e-5,
    "weight_init": "published", "sinusoids": "published", "prior_init": "zeros", "scalable_softmax": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "training_length": 128},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "training_length": 128},
    "l6": {**_PAPER, "hidden_size": 512, "num_hidden_layers": 6},
    "l8": {**_PAPER, "hidden_size": 768, "num_hidden_layers": 8},
    "l12": {**_PAPER, "hidden_size": 768, "num_hidden_layers": 12},
    "l15": {**_PAPER, "hidden_size": 1152, "num_hidden_layers": 15, "num_attention_heads": 24},
    "l18": {**_PAPER, "hidden_size": 1536, "num_hidden_layers": 18, "num_attention_heads": 32},
    "l24": {**_PAPER, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 64},
}


@plain_errors
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
    `t5`. Priors that depend on the query: `cabam` (generalized Gaussian), `profiles` (learned profiles over distance),
    `fire`. Others: `rope`, `sinusoidal`."""
    prior_init: str | list[list[list[float | int]]] | None = None
    """For `bam`: where heads start. `reader`: lower layers local, and half of the heads of the last layer retrieve, so
    that long prompts cost less. `zeros` (flat, as published), `alibi`, `spread`, `linear` or `sampled`: all layers
    alike. Or [beta, scale in tokens] of each head of each layer. The default is `reader`, but `zeros` for one layer or
    one head, and for a prior that layers share."""
    prior_epsilon: float | int = 1e-5
    """For `bam`: 1e-5 as published; 1 lets a retrieval head still see its own token."""
    learn_centre: bool = False
    """For `bam`: whether the centres of the priors are learned too."""
    prior_hidden: int = 32
    """For `cabam` and `fire`: hidden units of the prior's network."""
    profile_rank: int = 16
    """For `profiles`: number of profiles that a layer's queries mix."""
    profile_extent: int | None = None
    """For `profiles`: distances that a profile covers; the training length by default."""
    share_prior: bool = False
    """One prior for all layers."""
    window: int | list[int] = 128
    """For `window`: keys that a query sees, one number or one for each head."""
    sinks: int = 0
    """First tokens of each document that stay visible at any distance, each with a learned log-prior of its own; 0 for
    none."""
    rope_parameters: dict[str, Any] | None = None
    """For `rope`: as for other models of transformers, `rope_type` and its factors included."""
    sinusoids: str = "scaled"
    """For `sinusoidal`: `scaled`, sines and then cosines with the amplitude √2 · initializer_range; or `published`, as
    the paper's code has them: in turns, with amplitude 1, each cosine half a step lower in frequency than its sine."""

    scalable_softmax: bool | str | list[bool | list[bool]] | None = None
    """Heads with Scalable Softmax: all, none, or for each layer true, false, or a list with one entry for each head.
    `retrieval`, for `bam`: heads that start with beta ≤ 0. The default is `retrieval` with `prior_init: reader`, else
    true."""
    learned_temperature: bool = False
    """Whether layers without Scalable Softmax learn a constant temperature for each head. In a layer where some heads
    have Scalable Softmax, the others always learn one."""
    temperature_init: float | int = 1.0
    """Start value of s in Scalable Softmax, and of the constant temperatures."""
    scale_prior: bool | None = None
    """Whether temperatures multiply the prior too, or the content alone. The default is true, but false for `alibi`,
    whose prior would become narrower as the text grows."""
    qk_norm: bool = False
    """Whether queries and keys are normalised. Then no content logit exceeds √head_dim."""

    rms_norm_eps: float | int = 1e-6
    """Epsilon of RMSNorm."""
    weight_init: str = "normal"
    """New weights: `normal`, with the standard deviation initializer_range; or `published`, embeddings with the
    standard deviation 1, and matrices uniform in ±1/√(their inputs)."""
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
        _check_unknown(kwargs, [field.name for field in dataclasses.fields(self)])
        _check_dtype(self.dtype)
        _check_dtype(kwargs.get("torch_dtype"))
        self._check_sizes("hidden_size", "num_attention_heads", "training_length")
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(f"hidden_size {self.hidden_size} does not divide by {self.num_attention_heads} heads")
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.scale_prior is None:
            self.scale_prior = self.position != "alibi"
        if self.prior_init is None:
            self.prior_init = "reader" if self.position == "bam" and self._has_parts() else "zeros"
        if self.scalable_softmax is None:
            self.scalable_softmax = "retrieval" if (self.position, self.prior_init) == ("bam", "reader") else True
        if self.max_position_embeddings is None and self.position == "rope":
            self.max_position_embeddings = self.training_length
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Also takes the name of a shipped model. `from_pretrained` reads this."""
        return super().get_config_dict(resolve(pretrained_model_name_or_path), **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Reading a configuration imports its models, with which the Auto classes then know them."""
        import_module(f"{cls.__module__.rpartition('.')[0]}.modeling")
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "BamConfig":
        """`tiny`, `small`, or the paper's `l6`, `l8`, `l12`, `l15`, `l18`, `l24`; any setting can be changed."""
        if name not in PRESETS:
            raise ValueError(f"there is no preset {shown(name)}; there are {', '.join(PRESETS)}")
        known = [f.name for f in dataclasses.fields(cls)]
        if moved := [key for key in changes if key in MOVED]:
            raise ValueError(f"the setting {moved[0]} is of an earlier version; it is now {MOVED[moved[0]]}")
        if unknown := [key for key in changes if key not in known]:
            raise ValueError(no_setting("model", unknown[0], known))
        return cls(**{**PRESETS[name], **changes})

    def scalable_heads(self) -> list[list[bool]]:
        """Whether each head has Scalable Softmax, by layer."""
        layers = self.scalable_softmax
        assert layers is not None  # after __post_init__
        if isinstance(layers, bool):
            layers = [layers] * self.num_hidden_layers
        elif isinstance(layers, str):
            return [self._retrieval_heads(layer) for layer in range(self.num_hidden_layers)]
        heads = [[layer] * self.num_attention_heads if isinstance(layer, bool) else layer for layer in layers]
        if [len(layer) for layer in heads] != [self.num_attention_heads] * self.num_hidden_layers:
            raise ValueError(
                "scalable_softmax must be true, false, retrieval, or for each of "
                f"{self.num_hidden_layers} layers true, false, or a list of {self.num_attention_heads}"
            )
        return heads

    def placed_heads(self, layer: int) -> list[list[float | int]] | None:
        """[beta, scale in tokens] of each head of a layer; None if `prior_init` names a rule for all layers alike."""
        if self.prior_init == "reader":
            return reader_heads(self.num_attention_heads, retrieves=layer >= self.first_retrieval_layer)
        return self.prior_init[layer] if isinstance(self.prior_init, list) else None

    @property
    def first_retrieval_layer(self) -> int:
        """The first layer that retrieves with `prior_init: reader`."""
        return self.num_hidden_layers - 1

    def _retrieval_heads(self, layer: int) -> list[bool]:
        if self.scalable_softmax != "retrieval":
            raise ValueError(f"scalable_softmax is {shown(self.scalable_softmax)}; the only word allowed is retrieval")
        if self.position != "bam":
            raise ValueError(f"scalable_softmax is 'retrieval' and position {self.position!r}; bam is needed")
        heads, init = self.num_attention_heads, self.prior_init
        if init == "sampled":
            raise ValueError("scalable_softmax is 'retrieval' and prior_init sampled; random heads have no known beta")
        if (placed := self.placed_heads(0 if self.share_prior else layer)) is not None:
            return [beta <= 0 for beta, _ in placed]
        with torch.device("cpu"):  # from_pretrained makes models without memory
            return [beta <= 0 for beta in GeneralizedGaussian(heads, init).theta_beta.tolist()]  # type: ignore[arg-type]

    def _check(self) -> None:
        """Raise an error for settings that do not fit together."""
        if self.position not in POSITIONS:
            raise ValueError(f"position is {shown(self.position)}; allowed are {', '.join(POSITIONS)}")
        if self.sinusoids not in ("scaled", "published"):
            raise ValueError(f"sinusoids is {shown(self.sinusoids)}; allowed are scaled and published")
        if self.weight_init not in ("normal", "published"):
            raise ValueError(f"weight_init is {shown(self.weight_init)}; allowed are normal and published")
        self._check_sizes(*(name for name in LARGEST if getattr(self, name) is not None))
        for name in ("prior_epsilon", "temperature_init", "rms_norm_eps", "initializer_range"):
            _check_positive(name, getattr(self, name))
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance is {shown(self.tolerance)}; 0 ≤ tolerance < 1 is needed")
        if not is_whole(self.sinks, 0, MOST_SINKS):
            raise ValueError(f"sinks is {shown(self.sinks)}; a number of tokens up to {MOST_SINKS:,}, or 0, is needed")
        self._check_windows()
        self._check_tokens()
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"there are {self.num_attention_heads} heads and {self.num_key_value_heads} key/value heads; the "
                "latter must divide the former"
            )
        self._check_prior_init()
        self.scalable_heads()
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
            for beta, scale in (head for layer in self.prior_init for head in layer):
                _check_positive("a scale of prior_init", scale)
                if not is_number(beta) or abs(beta) > 100:
                    raise ValueError(f"a beta of prior_init is {shown(beta)}; a number from -100 to 100 is needed")
        elif self.prior_init not in (rules := (*get_args(Initialisation), "reader")):
            raise ValueError(f"prior_init is {shown(self.prior_init)}; allowed are {', '.join(rules)}, or a list")
        elif self.prior_init == "reader" and not self.share_prior and not self._has_parts():
            raise ValueError(
                f"prior_init is reader, with {self.num_hidden_layers} layers of {self.num_attention_heads} heads; at "
                "least 2 of each are needed, since it gives layers and heads different parts"
            )
        elif self.prior_init == "reader" and self.share_prior:
            raise ValueError("prior_init is reader and share_prior true; it gives layers different priors")

    def _has_parts(self) -> bool:
        """Whether there are layers and heads, with priors of their own, for the parts that `reader` gives them."""
        return self.num_hidden_layers >= 2 and self.num_attention_heads >= 2 and not self.share_prior

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            if not is_whole(getattr(self, name), 1, LARGEST[name]):
                given = shown(getattr(self, name))
                raise ValueError(f"{name} is {given}; it must be at least 1 and at most {LARGEST[name]:,}")

    def _check_windows(self) -> None:
        windows = [self.window] * self.num_attention_heads if isinstance(self.window, int) else self.window
        if not all(is_whole(width, 1, WIDEST_WINDOW) for width in windows):
            raise ValueError(f"window is {shown(self.window)}; at least 1 key is needed, and at most {WIDEST_WINDOW:,}")
        if len(windows) != self.num_attention_heads:
            raise ValueError(f"window has {len(windows)} numbers and the model {self.num_attention_heads} heads")

    def _check_tokens(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not is_whole(token, 0, self.vocab_size - 1):
                    raise ValueError(f"{name} is {shown(value)}; tokens are from 0 to {self.vocab_size - 1:,}")

    def _check_rope(self) -> None:
        rope = self.rope_parameters or {}
        for name in rope:
            if name not in ROPE_SETTINGS:
                raise ValueError(no_setting("rope_parameters", name, ROPE_SETTINGS))
        for name, value in rope.items():
            self._check_rope_setting(name, value)
        if self.position == "rope" and self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; an even number is needed for the position rope")
        rope_type = rope.get("rope_type", "default")
        if self.position == "rope" and rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"rope_type is {shown(rope_type)}; allowed are default, {', '.join(ROPE_INIT_FUNCTIONS)}")

    def _check_rope_setting(self, name: str, value: object) -> None:
        full_name = f"{name} of rope_parameters"
        if name in ("rope_type", "type"):
            if not isinstance(value, str):
                raise ValueError(wrong_type(full_name, value, str))
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(wrong_type(full_name, value, bool))
        elif name in ("short_factor", "long_factor"):
            if not isinstance(value, list) or not all(is_number(each) for each in value):
                raise ValueError(wrong_type(full_name, value, list[float]))
        elif name == "original_max_position_embeddings":
            if not is_whole(value, 1, LARGEST["training_length"]):
                raise ValueError(f"{full_name} is {shown(value)}; a positive whole number is needed")
        elif value is not None or name in ("rope_theta", "factor"):
            _check_positive(full_name, value, least=1.0 if name == "factor" else LEAST_NUMBER)


def _check_positive(name: str, value: object, least: float = LEAST_NUMBER) -> None:
    if not is_number(value) or not least <= value <= LARGEST_NUMBER:  # type: ignore[operator]
        needed = "a positive number" if least == LEAST_NUMBER else f"a number of at least {least:g}"
        raise ValueError(f"{name} is {shown(value)}; {needed} is needed")


def _check_unknown(settings: dict[str, Any], known: list[str]) -> None:
    """Raise an error for a name that resembles one of ours: the base class takes any name, and ignores it."""
    for name in settings:
        if name not in ("torch_dtype", "dtype") and difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            raise ValueError(no_setting("the configuration", name, known))


def _check_dtype(dtype: object) -> None:
    given = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise ValueError(f"dtype is {shown(dtype)}; the name of a floating-point type such as float32 is needed")


AutoConfig.register("bam", BamConfig)
