"""Settings of BLOOM, MPT and Falcon with a prior: those of transformers, and how the prior is made and read."""

# No `from __future__ import annotations`: `strict` checks real types and not strings.
import math
from importlib import import_module
from typing import Any, Protocol

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, BloomConfig, FalconConfig, MptConfig

from bayesattn.errors import UserError, is_number, is_whole, plain_errors, shown
from bayesattn.priors import alibi_slopes

PRIORS = ("laplace", "bam")


class AlibiConfig(Protocol):
    """What the three configurations have in common."""

    prior: str
    tolerance: float | int
    num_attention_heads: int
    num_hidden_layers: int
    hidden_size: int

    def slopes(self) -> Tensor:
        """The slopes that the model was trained with, `[heads]`, as nats per token."""


class ReadWithModels:
    """Reading a configuration imports its models, with which the Auto classes then know them."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers."""
        import_module("bayesattn.models.alibi.modeling")
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


def _check(config: Any, dropout: str, dropped: object) -> None:
    if config.prior not in PRIORS:
        raise UserError(f"prior is {shown(config.prior)}; allowed are {', '.join(PRIORS)}")
    if not is_number(config.tolerance) or not 0.0 <= config.tolerance < 1.0:
        raise UserError(f"tolerance is {shown(config.tolerance)}; 0 ≤ tolerance < 1 is needed")
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "training_length"):
        if not is_whole(getattr(config, name), 1, 2**26):
            raise UserError(f"{name} is {shown(getattr(config, name))}; a whole number from 1 to {2**26:,} is needed")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(f"hidden_size {config.hidden_size} does not divide by {config.num_attention_heads} heads")
    if dropped:
        raise UserError(f"{dropout} is {shown(dropped)}; attention weights are never written out, so 0 is needed")


@plain_errors
@strict
class BayesBloomConfig(ReadWithModels, BloomConfig):
    """BLOOM with a prior in each layer."""

    model_type = "bayes_bloom"

    prior: str = "laplace"
    """The family of the priors, which start as the slopes: `laplace`, one learned slope for each head; or `bam`,
    generalized Gaussians that can become any shape."""
    tolerance: float | int = 1e-6
    """Posterior mass per query and layer that inference may leave out."""
    training_length: int = 2048
    """Tokens of a training context. Evaluations give lengths as multiples of it."""
    use_cache: bool = False
    """Whether a plain call returns a cache. `generate()` uses one in any case."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        _check(self, "attention_dropout", self.attention_dropout)

    def slopes(self) -> Tensor:
        """ALiBi's."""
        return alibi_slopes(self.num_attention_heads)


@plain_errors
@strict
class BayesMptConfig(ReadWithModels, MptConfig):
    """MPT with a prior in each layer."""

    model_type = "bayes_mpt"

    prior: str = "laplace"
    """As in `BayesBloomConfig`."""
    tolerance: float | int = 1e-6
    """Posterior mass per query and layer that inference may leave out."""
    training_length: int = 2048
    """Tokens of a training context. Evaluations give lengths as multiples of it."""
    use_cache: bool = False
    """Whether a plain call returns a cache. `generate()` uses one in any case."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        attention: Any = self.attn_config
        if not attention.alibi:
            raise UserError("attn_config.alibi is false; a model with ALiBi is needed")
        for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
            if getattr(attention, name):
                raise UserError(f"attn_config.{name} is true; transformers does not compute this for MPT, nor do we")
        if not is_whole(attention.alibi_bias_max, 1, 1024):
            given = shown(attention.alibi_bias_max)
            raise UserError(f"attn_config.alibi_bias_max is {given}; a whole number from 1 to 1024 is needed")
        _check(self, "attn_config.attn_pdrop", attention.attn_pdrop)

    def slopes(self) -> Tensor:
        """Those of `alibi_bias_max`: 2^(−max/h), 2^(−2·max/h), …, where h is the next power of two.

        With fewer heads than h, every second one comes first. transformers takes 8 whatever the setting is.
        """
        attention: Any = self.attn_config
        heads = self.num_attention_heads
        most = 2 ** math.ceil(math.log2(heads))
        exponents = [-attention.alibi_bias_max * (head + 1) / most for head in range(most)]
        if most != heads:
            exponents = (exponents[1::2] + exponents[::2])[:heads]
        return 2 ** Tensor(exponents)


@plain_errors
@strict
class BayesFalconConfig(ReadWithModels, FalconConfig):
    """Falcon with ALiBi, and a prior in each layer."""

    model_type = "bayes_falcon"

    alibi: bool | None = True
    """Always true."""
    prior: str = "laplace"
    """As in `BayesBloomConfig`."""
    tolerance: float | int = 1e-6
    """Posterior mass per query and layer that inference may leave out."""
    training_length: int = 2048
    """Tokens of a training context. Evaluations give lengths as multiples of it."""
    use_cache: bool = False
    """Whether a plain call returns a cache. `generate()` uses one in any case."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not self.alibi:
            raise UserError("alibi is false: this Falcon has rotary positions; a model with ALiBi is needed")
        _check(self, "attention_dropout", self.attention_dropout)

    def slopes(self) -> Tensor:
        """ALiBi's in bfloat16, as Falcon has them, over √D: it scales the sum of content and bias."""
        size = self.hidden_size // self.num_attention_heads
        return alibi_slopes(self.num_attention_heads).bfloat16().float() * size**-0.5


for config in (BayesBloomConfig, BayesMptConfig, BayesFalconConfig):
    AutoConfig.register(config.model_type, config)
