"""Attention of BLOOM, MPT and Falcon: their projections around a prior that starts as their slopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from bayesattn.attention import LayerCache
from bayesattn.models.adapters import in_use
from bayesattn.models.alibi.configuration import AlibiConfig
from bayesattn.models.attention import DecoderAttention
from bayesattn.priors import GeneralizedGaussian, Laplace, Prior


def make_prior(config: AlibiConfig) -> Prior:
    """The prior of a layer, with the slopes that the model was trained with. Both families are learned."""
    if config.prior == "laplace":
        return Laplace(config.num_attention_heads, config.slopes(), learned=True)
    prior = GeneralizedGaussian(config.num_attention_heads)
    with torch.no_grad():
        prior.theta_beta.fill_(1.0)
        prior.theta_alpha.copy_(config.slopes().log())
    return prior


class PriorAttention(DecoderAttention):
    """What the three attention layers share; a subclass also has the layer of transformers as a base."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        make: Any = super().__init__
        make(config, layer_idx)
        self.config, self.temperature = config, None
        self.own_prior = make_prior(config)

    @property
    def prior(self) -> Prior:
        """Of the query heads: the source's slopes, or what they have become."""
        prior = in_use(self.own_prior)
        assert isinstance(prior, Prior)
        return prior


class BayesBloomAttention(PriorAttention, BloomAttention):
    """BLOOM's attention."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: None,
        attention_mask: Tensor | None,
        layer_past: LayerCache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Called by the layer of transformers, with document ids as the mask."""
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        out = self.dense(self.attend_or_continue(q, k, v, self.prior, attention_mask, layer_past))
        return dropout_add(out, residual, self.hidden_dropout, self.training), None


class BayesMptAttention(PriorAttention, MptAttention):
    """MPT's attention."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.softmax_scale = config.attn_config.softmax_scale

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_bias: None,
        past_key_values: LayerCache | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Called by the layer of transformers, with document ids as the mask."""
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return self.out_proj(self.attend_or_continue(q, k, v, self.prior, attention_mask, past_key_values)), None


class BayesFalconAttention(PriorAttention, FalconAttention):
    """Falcon's attention with ALiBi."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        alibi: None,
        attention_mask: Tensor | None,
        layer_past: LayerCache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Called by the layer of transformers, with document ids as the mask."""
        # For each key head its queries, then the key, then the value: with one key head or as many as queries too.
        rows = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        q = rows[..., :-2, :].flatten(2, 3).transpose(1, 2)
        k, v = rows[..., -2, :].transpose(1, 2), rows[..., -1, :].transpose(1, 2)
        return self.dense(self.attend_or_continue(q, k, v, self.prior, attention_mask, layer_past)), None
