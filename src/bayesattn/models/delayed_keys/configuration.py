"""The settings of a model with delayed keys."""

# No `from __future__ import annotations`: `strict` checks real types and not strings.
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig

from bayesattn.errors import is_whole, plain_errors, shown
from bayesattn.models.bam.configuration import LARGEST, BamConfig


@plain_errors
@strict
class DelayedKeysConfig(BamConfig):
    """A BAM model whose last layers share one input for keys and values; chosen heads have them with a look-ahead."""

    model_type = "delayed_keys"

    cross_layers: int = 1
    """How many of the last layers share one input for keys and values: the hidden states before the first of them.
    For a long prompt, these layers compute all keys and values, but only the requested queries."""
    key_delay: int = 0
    """Tokens of look-ahead. Keys and values of the cross layers are made when this many more tokens are known, so that
    a number can be found by a name that follows it. A query sees a key only from then on. 0 for none."""
    delayed_heads: list[int] | None = None
    """Key/value heads of the cross layers whose keys are delayed; all by default. Leave some without, for queries
    about the last tokens."""

    @property
    def first_retrieval_layer(self) -> int:
        """All cross layers retrieve: for a long prompt they compute the requested queries only."""
        return self.num_hidden_layers - self.cross_layers

    def _check(self) -> None:
        super()._check()
        if not 1 <= self.cross_layers <= self.num_hidden_layers:
            raise ValueError(
                f"cross_layers is {shown(self.cross_layers)}; 1 to {self.num_hidden_layers} (all layers) are allowed"
            )
        if not is_whole(self.key_delay, 0, LARGEST["training_length"]):
            raise ValueError(f"key_delay is {shown(self.key_delay)}; a number of tokens is needed, 0 for none")
        if self.key_delay and self.position != "bam":
            raise ValueError(f"key_delay is {self.key_delay} and position {self.position!r}; bam is needed")
        if self.key_delay and self.sinks:
            raise ValueError(
                f"key_delay is {self.key_delay} and sinks {self.sinks}; the first delayed keys stand for no tokens, so "
                "one of the two must be 0"
            )
        if self.delayed_heads is not None:
            assert self.num_key_value_heads is not None
            given, allowed = self.delayed_heads, set(range(self.num_key_value_heads))
            if not self.key_delay or not given or len(set(given)) < len(given) or not set(given) <= allowed:
                raise ValueError(
                    f"delayed_heads is {shown(given)} and key_delay {self.key_delay}; different key/value heads from 0 "
                    f"to {max(allowed)} are allowed, with a key_delay of at least 1"
                )


AutoConfig.register("delayed_keys", DelayedKeysConfig)
