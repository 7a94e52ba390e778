"""The model of the BAM paper (arXiv 2505.22842), a causal language model for Hugging Face transformers.

Shape letters: B batch, N tokens, M the last of them, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple

from bayesattn.attention import LayerCache, prefill
from bayesattn.models.bam.attention import BamAttention, LayerPrior, Rotary, make_prior
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.cache import BayesCache
from bayesattn.models.packing import check_tokens, document_numbers, left_padding, positions_in_documents, starts_again
from bayesattn.models.pretrained import BayesPreTrainedModel
from bayesattn.priors import Window

# The unwrapped forward: frequencies that depend on the length are set once a text (`_set_rope_length`), not per chunk.
_rotate = inspect.unwrap(LlamaRotaryEmbedding.forward)


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Sines and cosines of geometrically falling frequencies, `[..., size]`."""
    frequency = torch.exp(torch.arange(0, size, 2, device=positions.device) * (-math.log(10_000.0) / size))
    angle = positions.unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :size]


class BamMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BamConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class BamLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, each after a norm, each added to its input."""

    attention_class: ClassVar[type[BamAttention]] = BamAttention

    def __init__(self, config: BamConfig, prior: LayerPrior, scalable: Sequence[bool], owns_prior: bool = True) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, prior, scalable, owns_prior)
        self.mlp = BamMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        num_rows: int | None = None,
    ) -> Tensor:
        """The output of the last `num_rows` of the hidden states x `[B, N, C]`, of all by default."""
        rows = x if num_rows is None else x[:, x.shape[1] - num_rows :]
        states = self.input_layernorm(x)
        query_states = states[:, x.shape[1] - rows.shape[1] :]
        return self.add_residuals(rows, self.self_attn(query_states, states, rotary, document_ids, cache))

    def add_residuals(self, x: Tensor, attended: Tensor) -> Tensor:
        """Hidden states with what attention and SwiGLU add to them."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class BamPreTrainedModel(BayesPreTrainedModel):
    """Base class of the models with and without the language head."""

    config_class = BamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BamLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def reset_config_buffers(self) -> None:
        """Set buffers to the configuration's values, whatever was loaded with the weights."""
        layers: Any = self.base_model.layers
        for layer, scalable in zip(layers, self.config.scalable_heads(), strict=True):
            attention = layer.self_attn
            if attention.temperature is not None:
                attention.temperature.grows_with_length.copy_(torch.tensor(scalable))
            if isinstance(attention.prior, Window):
                attention.prior.width.copy_(Window(attention.prior.num_heads, self.config.window).width)


class BamModel(BamPreTrainedModel):
    """Tokens to hidden states."""

    # Tokens that go through all layers at a time when a text is read with a cache.
    chunk_size = 4096

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.shared_prior = make_prior(config, 0) if config.share_prior else None
        self._build_layers(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config) if config.position == "rope" else None  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    def _build_layers(self, config: BamConfig) -> None:
        """Make the layers; a variant of the model adds its own."""
        self.layers = nn.ModuleList(self._make_layer(config, number) for number in range(config.num_hidden_layers))

    def _make_layer(self, config: BamConfig, number: int, layer_class: type[BamLayer] = BamLayer) -> BamLayer:
        scalable = config.scalable_heads()[number]
        if self.shared_prior is not None:
            return layer_class(config, self.shared_prior, scalable, owns_prior=False)
        return layer_class(config, make_prior(config, number), scalable)

    @property
    def cache_class(self) -> type[BayesCache]:
        """The class of the caches that the model takes."""
        return BayesCache

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """An empty pruning cache; `tolerance` is the configuration's by default."""
        return BayesCache(self._layer_caches(tolerance))

    def _layer_caches(self, tolerance: float | None) -> list[LayerCache]:
        tolerance = self.config.tolerance if tolerance is None else tolerance
        layers: Any = self.layers
        return [layer.self_attn.make_cache(tolerance) for layer in layers]

    def layer_outputs(
        self,
        x: Tensor,
        rotary: Rotary | None,
        document_ids: Tensor | None = None,
        cache: BayesCache | None = None,
        num_rows: int | None = None,
    ) -> Iterator[Tensor]:
        """The output of each layer in turn, for hidden states x `[B, N, C]`.

        The last layer computes the last `num_rows` positions only. Every forward pass goes through here, with a cache
        and without.
        """
        caches = [None] * len(self.layers) if cache is None else cache.caches
        for number, (layer, layer_cache) in enumerate(zip(self.layers, caches, strict=True)):
            rows = num_rows if number == len(self.layers) - 1 else None
            x = layer(x, rotary, document_ids, layer_cache, rows)
            yield x

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: BayesCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_rows: int | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last `num_rows` positions, of all by default.

        Without a cache, `document_ids` separate packed documents, or `position_ids` that start at 0 again do. Zeros in
        `attention_mask` mark padding on either side. With a cache, padding is on the left, there are no gradients, and
        hidden states between layers (`output_hidden_states`) are not kept.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        if input_ids is not None:
            check_tokens("input_ids", input_ids, self.config.vocab_size)
        if output_attentions:
            raise ValueError("attention weights are never written out; `bayesattn.posterior` computes those of a layer")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        num_rows = None if num_rows is None else min(num_rows, tokens.shape[1])
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = self.make_cache()
        if past_key_values is not None:
            if self.training and torch.is_grad_enabled():
                raise ValueError("a cache carries no gradients; train with use_cache=False")
            if output_hidden_states:
                raise ValueError("the hidden states between layers are not kept with a cache; set use_cache=False")
            if document_ids is not None or starts_again(position_ids, attention_mask):
                raise ValueError(
                    "packed documents, or zeros inside of attention_mask, and a cache do not go together; call without "
                    "past_key_values"
                )
            x = self._continue(tokens, attention_mask, past_key_values, num_rows or tokens.shape[1])
            return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)
        documents = document_numbers(tokens, attention_mask, position_ids, document_ids)
        positions = positions_in_documents(tokens, documents) if position_ids is None else position_ids
        self._set_rope_length(positions, reset=True)
        embeddings, rotary = self._embed(tokens, positions)
        outputs = self.layer_outputs(embeddings, rotary, documents, None, num_rows)
        states = deque([embeddings], maxlen=None if output_hidden_states else 1)
        states.extend(outputs)
        x = self.norm(states.pop())
        # The last of the hidden states is normed, as in other models of transformers.
        kept = (*states, x) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=kept)

    def _set_rope_length(self, positions: Tensor, reset: bool) -> None:
        """Set rotary frequencies that depend on the length of a text by its last position; `reset` for a new text."""
        if self.rotary_emb is not None and self.rotary_emb.rope_type in ("dynamic", "longrope"):
            for position in ([torch.zeros_like(positions)] if reset else []) + [positions]:
                self.rotary_emb(self.embed_tokens.weight, position)

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        x = tokens if tokens.is_floating_point() else self.embed_tokens(tokens)
        if self.config.position == "sinusoidal":
            # On the scale of newly initialised embeddings.
            x = x + self.config.initializer_range * 2**0.5 * sinusoids(positions, x.shape[-1]).to(x.dtype)
        rotary = None if self.rotary_emb is None else _rotate(self.rotary_emb, x, positions.expand(len(x), -1))
        return x, rotary

    def _continue(self, tokens: Tensor, attention_mask: Tensor | None, cache: BayesCache, num_rows: int) -> Tensor:
        """Read tokens that follow those in the cache, a chunk at a time through all layers."""
        self._check_cache(cache)
        padding, length = left_padding(attention_mask, tokens), cache.get_seq_length()
        self._set_rope_length(torch.tensor([[length + tokens.shape[1] - 1]], device=tokens.device), reset=length == 0)
        padding = padding if padding is not None and padding.any() else None
        if padding is not None and length:
            raise ValueError("attention_mask has zeros among tokens that continue a text; padding must be before it")

        def decoder(part: Tensor, rows: int) -> Tensor:
            first, padding = cache.caches[0].length, cache.caches[0].padding
            positions = torch.arange(first, first + part.shape[1], device=part.device).unsqueeze(0)
            if padding is not None:
                positions = (positions - padding.to(part.device)[:, None]).clamp(min=0)
            outputs = self.layer_outputs(*self._embed(part, positions), None, cache, rows)
            return deque(outputs, maxlen=1).pop()

        with cache.unchanged_on_error():
            if padding is not None:
                cache.pad_left(padding)
            return prefill(decoder, cache.caches, tokens, last=num_rows, chunk=self.chunk_size)

    def _check_cache(self, cache: BayesCache) -> None:
        """Raise an error for a cache of another model."""
        if not isinstance(cache, BayesCache) or type(cache) is not self.cache_class:
            raise TypeError(f"past_key_values is a {type(cache).__name__}; make one with model.make_cache()")
        if len(cache.caches) != len(self.layers):
            raise ValueError(
                f"past_key_values has {len(cache.caches)} layers and the model {len(self.layers)}; make one with "
                "model.make_cache()"
            )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


class BamForCausalLM(BamPreTrainedModel, GenerationMixin):
    """The language model: next-token logits, label loss, `generate()`."""

    model_class: ClassVar[type[BamModel]] = BamModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = False  # the loss is a mean over the current batch

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        self.generation_config.use_cache = True  # generate() uses a cache, whatever config.use_cache is
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """`BamModel.make_cache`."""
        return self.model.make_cache(tolerance)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: BayesCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, N, V]`, of the last `logits_to_keep` positions unless that is 0, or of the positions it lists.

        `labels` are the tokens themselves, −100 where nothing is to be learned; `loss_weights` `[B, N]` weigh them in
        the loss, which is a mean.
        """
        if labels is not None:
            check_tokens("labels", labels, self.config.vocab_size, ignored=-100)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            num_rows=(logits_to_keep or None) if isinstance(logits_to_keep, int) and labels is None else None,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor) and labels is None:
            hidden = hidden[:, logits_to_keep]
        logits = self.lm_head(hidden)
        loss = None if labels is None else next_token_loss(logits, labels, loss_weights)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` gets the pruning cache, unless you pass one or turn caching off."""
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation is {generation_config.cache_implementation!r}; this model has one of its own"
                )
            model_kwargs["past_key_values"] = self.make_cache()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens


def next_token_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of each token given those before it."""
    rows, following = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    losses = cross_entropy(rows, following, reduction="none", ignore_index=-100)
    counted = (following != -100).float()
    if weights is not None:
        counted = counted * weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum().clamp(min=1e-6)


AutoModel.register(BamConfig, BamModel)
AutoModelForCausalLM.register(BamConfig, BamForCausalLM)
