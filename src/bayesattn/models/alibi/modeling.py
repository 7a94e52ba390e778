"""BLOOM, MPT and Falcon as causal models with priors: layers of transformers, the rest as in all our models."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import BloomBlock
from transformers.models.falcon.modeling_falcon import FalconDecoderLayer
from transformers.models.mpt.modeling_mpt import MptBlock

from bayesattn.attention import LayerCache
from bayesattn.models.alibi.attention import (
    BayesBloomAttention,
    BayesFalconAttention,
    BayesMptAttention,
    PriorAttention,
)
from bayesattn.models.alibi.configuration import BayesBloomConfig, BayesFalconConfig, BayesMptConfig
from bayesattn.models.decoder import Decoder, DecoderForCausalLM
from bayesattn.models.pretrained import BayesPreTrainedModel


class PriorLayer(nn.Module):
    """A layer that is called as those of all our models; a subclass also has the layer of transformers as a base.

    Its attention is replaced, and gets document ids in place of the mask.
    """

    attention_name: ClassVar[str] = "self_attention"
    attention_class: ClassVar[type[PriorAttention]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        make: Any = super().__init__
        make(config, layer_idx)
        setattr(self, self.attention_name, self.attention_class(config, layer_idx))

    @property
    def self_attn(self) -> PriorAttention:
        """The attention, by the name that all our layers have for it."""
        attention = getattr(self, self.attention_name)
        assert isinstance(attention, PriorAttention)
        return attention

    def forward(
        self,
        x: Tensor,
        rotary: None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        num_rows: int | None = None,
    ) -> Tensor:
        """The output of the last `num_rows` of the hidden states x `[B, N, C]`, of all by default."""
        layer: Any = super().forward
        out: Tensor = layer(x, None, document_ids, layer_past=cache)[0]
        return out if num_rows is None else out[:, out.shape[1] - num_rows :]


class BayesBloomLayer(PriorLayer, BloomBlock):  # type: ignore[misc]
    """BLOOM's layer."""

    attention_class = BayesBloomAttention


class BayesMptLayer(PriorLayer, MptBlock):  # type: ignore[misc]
    """MPT's layer."""

    attention_name = "attn"
    attention_class = BayesMptAttention


class BayesFalconLayer(PriorLayer, FalconDecoderLayer):  # type: ignore[misc]
    """Falcon's layer."""

    attention_class = BayesFalconAttention


class AlibiPreTrainedModel(BayesPreTrainedModel):
    """Base class of the models with and without the language head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BayesBloomLayer", "BayesMptLayer", "BayesFalconLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # A slope in bfloat16 would be off by up to 0.4%.
    _keep_in_fp32_modules_strict = ["own_prior"]  # noqa: RUF012

    def reset_config_buffers(self) -> None:
        """There are none."""


class AlibiModel(AlibiPreTrainedModel, Decoder):
    """Tokens to hidden states."""

    layer_class: ClassVar[type[nn.Module]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self._complete(config)
        self.gradient_checkpointing = False
        self.post_init()

    def _complete(self, config: Any) -> None:
        """Make what only one architecture has."""


class BayesBloomModel(AlibiModel):
    """BLOOM with priors."""

    config_class = BayesBloomConfig
    layer_class = BayesBloomLayer

    def _complete(self, config: Any) -> None:
        self.embedding_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, None]:
        return self.embedding_norm(super()._embed(tokens, positions)[0]), None


class BayesMptModel(AlibiModel):
    """MPT with priors."""

    config_class = BayesMptConfig
    layer_class = BayesMptLayer

    def _complete(self, config: Any) -> None:
        self.norm.register_parameter("bias", None)  # as everywhere in MPT


class BayesFalconModel(AlibiModel):
    """Falcon with priors."""

    config_class = BayesFalconConfig
    layer_class = BayesFalconLayer


class BayesBloomForCausalLM(AlibiPreTrainedModel, DecoderForCausalLM):
    """BLOOM with priors: next-token logits, label loss, `generate()` with the pruning cache."""

    config_class = BayesBloomConfig
    model_class = BayesBloomModel


class BayesMptForCausalLM(AlibiPreTrainedModel, DecoderForCausalLM):
    """MPT with priors: next-token logits, label loss, `generate()` with the pruning cache."""

    config_class = BayesMptConfig
    model_class = BayesMptModel


class BayesFalconForCausalLM(AlibiPreTrainedModel, DecoderForCausalLM):
    """Falcon with priors: next-token logits, label loss, `generate()` with the pruning cache."""

    config_class = BayesFalconConfig
    model_class = BayesFalconModel


for config, model, causal_model in (
    (BayesBloomConfig, BayesBloomModel, BayesBloomForCausalLM),
    (BayesMptConfig, BayesMptModel, BayesMptForCausalLM),
    (BayesFalconConfig, BayesFalconModel, BayesFalconForCausalLM),
):
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, causal_model)
