"""A BAM model with delayed keys and cross layers.

A causal model cannot mark a token with what comes after it, such as a number with the name that follows. But a query
may come later still. So a key can be made when the next tokens are known, if queries see it only from then on.

Shape letters: B batch, N tokens, M the last of them, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModel, AutoModelForCausalLM

from bayesattn.attention import LayerCache
from bayesattn.models.bam.attention import BamAttention, Rotary
from bayesattn.models.bam.modeling import BamForCausalLM, BamLayer, BamModel, BamPreTrainedModel
from bayesattn.models.cache import BayesCache
from bayesattn.models.delayed_keys.cache import DelayedKeysCache
from bayesattn.models.delayed_keys.configuration import DelayedKeysConfig
from bayesattn.priors import GeneralizedGaussian, Product, Window


class CrossAttention(BamAttention):
    """Attention in which delayed heads project keys and values from `delayed_states`, others from `key_states`."""

    config: DelayedKeysConfig

    def forward(  # type: ignore[override]
        self,
        query_states: Tensor,
        key_states: Tensor,
        delayed_states: Tensor | None,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        q = self.project_queries(query_states, rotary)
        if delayed_states is None:
            k, v = self.project_keys(key_states, rotary)
        elif self.config.delayed_heads is None:
            k, v = self.project_keys(delayed_states, rotary)
        else:
            delayed = torch.zeros(self.k_proj.out_features // self.head_dim, dtype=torch.bool, device=q.device)
            delayed[self.config.delayed_heads] = True
            late, now = self.project_keys(delayed_states, rotary), self.project_keys(key_states, rotary)
            k, v = (torch.where(delayed[:, None, None], *pair) for pair in zip(late, now, strict=True))
        prior = self.prior_of(query_states, k.shape[2], document_ids, cache)
        return self.o_proj(self.attend_or_continue(q, k, v, prior, document_ids, cache))


class CrossLayer(BamLayer):
    """A layer whose keys and values come from `memory`, the hidden states that enter the first cross layer."""

    attention_class = CrossAttention

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        delayed_states: Tensor | None = None,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        num_rows: int | None = None,
    ) -> Tensor:
        """The output of the last `num_rows` of x `[B, M, C]`, which are the last positions of `memory` `[B, N, C]`."""
        rows = x if num_rows is None else x[:, x.shape[1] - num_rows :]
        key_states = self.input_layernorm(memory)
        first = memory.shape[1] - rows.shape[1]
        query_states = key_states[:, first:] if x is memory else self.input_layernorm(rows)
        delayed_states = None if delayed_states is None else self.input_layernorm(delayed_states)
        attended = self.self_attn(query_states, key_states, delayed_states, rotary, document_ids, cache)
        return self.add_residuals(rows, attended)


class DelayedStates(BamLayer):
    """Encodes each token again when `delay` more are known: causal attention on the reversed sequence.

    Its prior is a product: a learned generalized Gaussian, and a window that ends the look-ahead.
    """

    def __init__(self, config: DelayedKeysConfig) -> None:
        heads, delay = config.num_attention_heads, config.key_delay
        scales = [delay ** (head / max(1, heads - 1)) for head in range(heads)]
        gaussian = GeneralizedGaussian.from_shape([1.0] * heads, scales, epsilon=config.prior_epsilon)
        prior = gaussian * Window(heads, delay + 1)
        super().__init__(config, prior, [False] * heads, owns_prior=False)
        self.prior, self.delay = prior, delay

    @property
    def window(self) -> Window:
        """What ends the look-ahead."""
        assert isinstance(self.prior, Product)
        assert isinstance(self.prior.second, Window)
        return self.prior.second

    def make_cache(self) -> LayerCache:
        """An empty cache for the hidden states whose look-ahead has not ended."""
        window = Window(1, self.delay + 1).to(self.input_layernorm.weight.device)
        return LayerCache(window, tolerance=0.0, content_spread=0.0, same_positions=True)

    def encode(
        self,
        x: Tensor,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        position: int | None = None,
    ) -> Tensor:
        """Position i of the result has the state of token i − delay, encoded with the tokens up to i, `[B, N, C]`.

        It is zero if that token is in another document. The cache holds the hidden states before x, which starts at
        `position`.
        """
        rows = x.shape[1]
        documents = x.new_zeros(x.shape[:2], dtype=torch.long) if document_ids is None else document_ids.long()
        if cache is not None:
            states, *_ = cache.update(x[:, None], x[:, None, :, :0], position=position)
            x = states[:, 0, -(self.delay + rows) :]
            if cache.padding is None and x.shape[1] == self.delay + rows:  # one document, as with most tokens
                return self(x.flip(1), num_rows=rows).flip(1)
            place = torch.arange(cache.length - x.shape[1], cache.length, device=x.device)
            padding = torch.zeros(len(x), dtype=torch.long) if cache.padding is None else cache.padding
            documents = torch.where(place < padding.to(x.device)[:, None], -1, 0)
        missing = self.delay + rows - x.shape[1]
        x, documents = pad(x, (0, 0, missing, 0)), pad(documents, (missing, 0), value=-1)
        delayed_states = self(x.flip(1), None, documents.flip(1), None, rows).flip(1)
        same = (documents[:, :rows] == documents[:, self.delay :]) & (documents[:, :rows] >= 0)
        return delayed_states * same.to(delayed_states.device).unsqueeze(-1)


class DelayedKeysPreTrainedModel(BamPreTrainedModel):
    """Base class of the models with and without the language head."""

    config_class = DelayedKeysConfig
    _no_split_modules = ["BamLayer", "CrossLayer", "DelayedStates"]  # noqa: RUF012

    def reset_config_buffers(self) -> None:
        super().reset_config_buffers()
        if isinstance(encoder := self.base_model.delay_encoder, DelayedStates):
            encoder.window.width.fill_(self.config.key_delay + 1)


class DelayedKeysModel(DelayedKeysPreTrainedModel, BamModel):
    """Tokens to hidden states."""

    def _build_layers(self, config: DelayedKeysConfig) -> None:  # type: ignore[override]
        super()._build_layers(config)
        self.delay_encoder = DelayedStates(config) if config.key_delay else None

    def _make_layer(self, config: DelayedKeysConfig, number: int) -> BamLayer:  # type: ignore[override]
        cross = number >= config.num_hidden_layers - config.cross_layers
        return super()._make_layer(config, number, CrossLayer if cross else BamLayer)

    @property
    def cache_class(self) -> type[BayesCache]:
        return BayesCache if self.delay_encoder is None else DelayedKeysCache

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """An empty pruning cache; `tolerance` is the configuration's by default."""
        if self.delay_encoder is None:
            return super().make_cache(tolerance)
        return DelayedKeysCache(self._layer_caches(tolerance), self.delay_encoder.make_cache())

    def layer_outputs(
        self,
        x: Tensor,
        rotary: Rotary | None,
        document_ids: Tensor | None = None,
        cache: BayesCache | None = None,
        num_rows: int | None = None,
    ) -> Iterator[Tensor]:
        """The output of each layer in turn; cross layers compute the last `num_rows` positions only."""
        first = len(self.layers) - self.config.cross_layers
        caches = [None] * len(self.layers) if cache is None else cache.caches
        memory, delayed_states = x, None
        for number, (layer, layer_cache) in enumerate(zip(self.layers, caches, strict=True)):
            if number < first:
                x = layer(x, rotary, document_ids, layer_cache)
                yield x
                continue
            if number == first:
                memory = x
                if self.delay_encoder is not None:
                    states, position = None, None
                    if isinstance(cache, DelayedKeysCache) and layer_cache is not None:
                        states, position = cache.states, layer_cache.length
                    delayed_states = self.delay_encoder.encode(x, document_ids, states, position)
            x = layer(x, memory, delayed_states, rotary, document_ids, layer_cache, num_rows)
            yield x


class DelayedKeysForCausalLM(DelayedKeysPreTrainedModel, BamForCausalLM):
    """The language model: next-token logits, label loss, `generate()`."""

    model_class = DelayedKeysModel


AutoModel.register(DelayedKeysConfig, DelayedKeysModel)
AutoModelForCausalLM.register(DelayedKeysConfig, DelayedKeysForCausalLM)
