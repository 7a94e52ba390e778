"""The settings of a BAM model."""

# No postponed annotations: `strict` checks settings by their types, and cannot where these are strings.
import dataclasses
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bayesattn.errors import no_setting
from bayesattn.models.shipped import resolve

PRIORS = ("bam", "alibi", "nope", "window", "kerple", "t5")
# Position that is not a prior: it changes queries, keys or embeddings, and the prior is uniform.
OTHERS = ("rope", "sinusoidal")

# What `rope_parameters` may have, for one scaling or another; of others transformers would say nothing aloud.
ROPE_SETTINGS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip

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
    """A decoder of pre-norm RMSNorm, SwiGLU and Bayesian attention, without biases.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, vocab_size: as everywhere. `intermediate_size` is twice the
            hidden size unless given; `num_key_value_heads` as many as there are heads; `head_dim` what is left to each.
        position: what tells tokens apart by place. Priors: `bam` (learned generalized Gaussian), `alibi`, `nope`
            (uniform), `window`, `kerple`, `t5`. Others: `rope`, `sinusoidal`.
        prior_init: for `bam`: `zeros`, `alibi`, `spread`, or for each layer the [beta, scale in tokens] of each head.
        prior_epsilon: for `bam`; 1e-5 as published, 1 lets a retrieval head still see its own token.
        learn_centre: for `bam`: whether the centres of the priors are learned too.
        share_prior: one prior for all layers.
        window: for `window`: keys a query sees, one number or one for each head.
        scalable_softmax: which heads have the length temperature: all, none, or for each layer true, false, or a list
            of them for its heads.
        learned_temperature: whether the heads of other layers learn a constant temperature; in a layer where some
            heads have the length temperature the others always do.
        temperature_init: where both start.
        scale_prior: whether temperatures multiply the prior too, or the content alone.
        temperature_jitter: in training, half of the sequences have their length temperatures multiplied by a number
            drawn from this range, evenly in its logarithm, so that the sharper attention of long texts is no news.
        reading_layers: how many of the last layers look at the same hidden states, those that enter the first of them.
            Of a long text only what is asked goes through these layers: each is one more look, for the price of its
            keys and values.
        hindsight: keys and values of the reading layers are made when so many more tokens have been read, of states
            that have seen those: a number can then be found by a name that follows it. 0 for none. Queries see them
            from then on; so leave some heads without, for what has just been said.
        hindsight_heads: which key/value heads of the reading layers have it; all by default.
        crowd: in training, heads with the length temperature see, in the last quarter of each sequence, up to so many
            other sequences of the batch beside their own, at the same distances: keys to tell the right ones from. How
            many is drawn anew each time: none, 1, 3, 7 …
        qk_norm: whether queries and keys are normalised; then no content logit exceeds √head_dim.
        rope_parameters: for `rope`: as for other models of transformers, `rope_type` and its factors included.
        training_length: tokens of a training context; lengths are told as multiples of it.
        tolerance: posterior mass per query and layer that inference may leave out.
        use_cache: whether a plain call returns a cache unasked; `generate()` has one in any case.
    """

    model_type = "bam"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int | None = None
    num_hidden_layers: int = 3
    reading_layers: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    position: str = "bam"
    prior_init: str | list[list[list[float | int]]] = "zeros"
    prior_epsilon: float | int = 1e-5
    learn_centre: bool = False
    share_prior: bool = False
    window: int | list[int] = 128
    scalable_softmax: bool | list[bool | list[bool]] = True
    learned_temperature: bool = False
    temperature_init: float | int = 1.0
    scale_prior: bool = True
    temperature_jitter: list[float | int] | None = None
    hindsight: int = 0
    hindsight_heads: list[int] | None = None
    crowd: int = 0
    qk_norm: bool = False
    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    training_length: int = 128
    max_position_embeddings: int | None = None
    tolerance: float | int = 1e-6
    use_cache: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % max(1, self.num_attention_heads):
                raise ValueError(f"hidden_size {self.hidden_size} does not divide by {self.num_attention_heads} heads")
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        if self.max_position_embeddings is None and self.position == "rope":
            self.max_position_embeddings = self.training_length  # what rope's scaling methods start from
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Of a shipped model too, by its name: what `from_pretrained` reads."""
        return super().get_config_dict(resolve(pretrained_model_name_or_path), **kwargs)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "BamConfig":
        """`tiny`, `small`, or the paper's `l6`, `l8`, `l12`, `l15`, `l18`, `l24`; any setting can be changed."""
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := [key for key in changes if key not in known]:
            raise ValueError(no_setting("model", unknown[0], known))
        return cls(**{**PRESETS[name], **changes})

    def _check(self) -> None:
        """One sentence for what does not fit together."""
        if self.position not in PRIORS + OTHERS:
            raise ValueError(f"position is {self.position!r}; allowed are {', '.join(PRIORS + OTHERS)}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "training_length")
        for name in (*sizes, "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.reading_layers <= self.num_hidden_layers:
            raise ValueError(
                f"reading_layers is {self.reading_layers}; 1 to {self.num_hidden_layers}, all layers, are allowed"
            )
        for name in ("prior_epsilon", "temperature_init", "rms_norm_eps", "initializer_range"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; a positive number is needed")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}; a share from 0 up to 1 is needed")
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
                raise ValueError("prior_init has a beta that is no number, or a scale that is not a positive one")
        elif self.prior_init not in ("zeros", "alibi", "spread"):
            raise ValueError(f"prior_init is {self.prior_init!r}; allowed are zeros, alibi, spread, or a list")
        jitter = self.temperature_jitter
        if jitter is not None and not (len(jitter) == 2 and 0 < jitter[0] <= jitter[1] < math.inf):
            raise ValueError(f"temperature_jitter is {jitter}; it must be two positive factors, the smaller first")
        if self.hindsight < 0:
            raise ValueError(f"hindsight is {self.hindsight}; a number of tokens is needed, 0 for none")
        if self.hindsight and self.position != "bam":
            raise ValueError(f"hindsight is {self.hindsight} and position {self.position!r}; it is for bam alone")
        if self.hindsight_heads is not None:
            given, there = self.hindsight_heads, set(range(self.num_key_value_heads))
            if not self.hindsight or not given or len(set(given)) < len(given) or not set(given) <= there:
                raise ValueError(
                    f"hindsight_heads is {given} and hindsight {self.hindsight}; different ones of the key/value heads "
                    f"0 to {max(there)} are needed, and hindsight for them"
                )
        if self.crowd < 0:
            raise ValueError(f"crowd is {self.crowd}; a number of other sequences is needed, 0 for none")
        if not any(map(any, self.heads_with_length_temperature())) and self.crowd:
            raise ValueError(f"crowd is {self.crowd} and no head has the length temperature; set scalable_softmax")
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
        rope_type = rope.get("rope_type", "default")
        if self.position == "rope" and rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"rope_type is {rope_type!r}; allowed are default, {', '.join(ROPE_INIT_FUNCTIONS)}")

    def heads_with_length_temperature(self) -> list[list[bool]]:
        """Per layer and head."""
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


AutoConfig.register("bam", BamConfig)
