"""What our causal models share: packed documents, padding, the pruning cache, `generate()`, the loss.

Shape letters: B batch, N tokens, M the last of them, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from bayesattn.attention import LayerCache, prefill
from bayesattn.errors import UserError
from bayesattn.models.cache import BayesCache, is_cache_of
from bayesattn.models.packing import check_tokens, document_numbers, left_padding, positions_in_documents, starts_again
from bayesattn.models.pretrained import BayesPreTrainedModel


class Decoder(BayesPreTrainedModel):
    """Tokens to hidden states.

    A subclass makes `embed_tokens`, `layers` and `norm`. A layer is called as `layer(x, rotary, document_ids, cache,
    num_rows)` and returns the hidden states of the last `num_rows` positions; its `self_attn` makes its cache.
    """

    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module

    # Tokens that go through all layers at a time when a text is read with a cache.
    chunk_size = 4096

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
        rotary: Any,
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
        nothing is compiled.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        if input_ids is not None:
            check_tokens("input_ids", input_ids, self.config.vocab_size)
        if output_attentions:
            raise UserError("attention weights are never written out; `bayesattn.posterior` computes those of a layer")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        num_rows = None if num_rows is None else min(num_rows, tokens.shape[1])
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = self.make_cache()
        if past_key_values is not None:
            if self.training and torch.is_grad_enabled():
                raise ValueError("a cache carries no gradients; train with use_cache=False")
            x, kept = self._continue(
                tokens,
                attention_mask,
                position_ids,
                document_ids,
                past_key_values,
                num_rows or tokens.shape[1],
                output_hidden_states,
            )
            return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values, hidden_states=kept)
        documents = document_numbers(tokens, attention_mask, position_ids, document_ids)
        positions = positions_in_documents(tokens, documents) if position_ids is None else position_ids
        self._set_length(positions, reset=True)
        embeddings, rotary = self._embed(tokens, positions)
        outputs = self.layer_outputs(embeddings, rotary, documents, None, num_rows)
        states = deque([embeddings], maxlen=None if output_hidden_states else 1)
        states.extend(outputs)
        x = self.norm(states.pop())
        # The last of the hidden states is normed, as in other models of transformers.
        kept = (*states, x) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=kept)

    def _set_length(self, positions: Tensor, reset: bool) -> None:
        """Prepare encodings that depend on the length of a text, for its last position; `reset` for a new text."""

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        """Hidden states of tokens, or of embeddings, and what layers get about positions."""
        return tokens if tokens.is_floating_point() else self.embed_tokens(tokens), None

    # A cache is state of Python: each length would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _continue(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        cache: BayesCache,
        num_rows: int,
        keep_states: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Read tokens that follow those in the cache, a chunk at a time through all layers.

        Returns the normed output of the last `num_rows`, and the hidden states of all layers if they are to be kept.
        """
        self._check_cache(cache)
        padding, length = left_padding(attention_mask, tokens), cache.get_seq_length()
        if document_ids is not None or starts_again(position_ids, attention_mask):
            raise ValueError("packed documents and a cache do not go together; call without past_key_values")
        self._set_length(torch.tensor([[length + tokens.shape[1] - 1]], device=tokens.device), reset=length == 0)
        padding = padding if padding is not None and padding.any() else None
        if padding is not None and length:
            raise ValueError("attention_mask has zeros among tokens that continue a text; padding must be before it")
        kept: list[list[Tensor]] = []

        def decoder(part: Tensor, rows: int) -> Tensor:
            first, padding = cache.caches[0].length, cache.caches[0].padding
            positions = torch.arange(first, first + part.shape[1], device=part.device).unsqueeze(0)
            if padding is not None:
                positions = (positions - padding.to(part.device)[:, None]).clamp(min=0)
            embeddings, rotary = self._embed(part, positions)
            states = deque([embeddings], maxlen=None if keep_states else 1)
            states.extend(self.layer_outputs(embeddings, rotary, None, cache, rows))
            last = states.pop()
            kept.append([*states])
            return last

        with cache.unchanged_on_error():
            if padding is not None:
                cache.pad_left(padding)
            x = self.norm(prefill(decoder, cache.caches, tokens, last=num_rows, chunk=self.chunk_size))
        return x, (*(torch.cat(chunks, 1) for chunks in zip(*kept, strict=True)), x) if keep_states else None

    def _check_cache(self, cache: BayesCache) -> None:
        """Raise an error for a cache of another model."""
        if not isinstance(cache, BayesCache) or type(cache) is not self.cache_class:
            raise TypeError(
                f"past_key_values is a {type(cache).__name__}; this model keeps for each head what its prior needs, so "
                "make one with model.make_cache(), or leave it out of generate()"
            )
        if len(cache.caches) != len(self.layers):
            raise ValueError(
                f"past_key_values has {len(cache.caches)} layers and the model {len(self.layers)}; make one with "
                "model.make_cache()"
            )
        layers: Any = self.layers
        if not all(is_cache_of(each, layer.self_attn.prior) for each, layer in zip(cache.caches, layers, strict=True)):
            raise ValueError("past_key_values is the cache of another model; make one with model.make_cache()")

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


class DecoderForCausalLM(BayesPreTrainedModel, GenerationMixin):
    """The language model: next-token logits, label loss, `generate()`."""

    model_class: ClassVar[type[Decoder]]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = False  # the loss is a mean over the current batch

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.generation_config.use_cache = True  # generate() uses a cache, whatever config.use_cache is
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """`Decoder.make_cache`."""
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

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Not for this model: `generate_batch` shares pages of keys among requests, and here heads keep different keys.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "continuous batching (generate_batch) keeps the same keys for all heads, and this model for each head what "
            "its prior needs; call generate() with a batch that is padded on the left"
        )

    generate_batch = init_continuous_batching

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
