"""A causal language model of Bayesian attention, for Hugging Face transformers.

Shape letters: B batch, H query heads, G key/value heads, N tokens, D head size, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple

from bayesattn.attention import LayerCache, prefill
from bayesattn.errors import UserError
from bayesattn.models.cache import BayesCache
from bayesattn.models.configuration import BamConfig
from bayesattn.models.layers import BamLayer, Hindsight, Rotary, make_prior
from bayesattn.models.packing import document_numbers, left_padding, positions_in_documents, starts_again
from bayesattn.models.shipped import resolve
from bayesattn.priors import Window

# Tokens that go through all layers at a time when a prompt is read.
CHUNK = 4096

# A module beside saved weights, which transformers imports when it is told to trust the folder's code.
REMOTE = "bam_code"
REMOTE_CODE = '''"""The code of this model is in the package bayesattn."""

from bayesattn.models.configuration import BamConfig as _Config
from bayesattn.models.modeling import BamForCausalLM as _ForCausalLM
from bayesattn.models.modeling import BamModel as _Model

BamConfig, BamForCausalLM, BamModel = _Config, _ForCausalLM, _Model
'''

# With the frequencies as they are: those that depend on the length are set for a whole text and not for each chunk.
_rotate = inspect.unwrap(LlamaRotaryEmbedding.forward)


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Sines and cosines of geometrically falling frequencies, [..., size]."""
    frequency = torch.exp(torch.arange(0, size, 2, device=positions.device) * (-math.log(10_000.0) / size))
    angle = positions.unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :size]


class BamPreTrainedModel(PreTrainedModel):
    """What the parts of the family share. `from_pretrained` also takes the name of a shipped model."""

    config_class = BamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BamLayer", "Hindsight"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        place = resolve(name)
        kind = _model_type(Path(place) / "config.json")
        if kind is not None and kind != "bam":
            raise UserError(f"{name} is a {kind} model and not a BAM model; load it with AutoModelForCausalLM")
        told = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        try:
            loaded: Any = super().from_pretrained(place, *args, output_loading_info=True, **kwargs)
        except SafetensorError as problem:
            raise UserError(f"the weights of {name} are damaged or cut short ({problem})") from problem
        except RuntimeError as problem:
            if "mismatched" not in str(problem):
                raise
            raise UserError(f"the weights of {name} do not have the shapes that its configuration tells") from problem
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
        model.follow_configuration()
        return (model, info) if told else model

    def follow_configuration(self) -> None:
        """What is set and not learned is as the configuration has it, whatever was loaded with the weights."""
        layers: Any = self.base_model.layers
        for layer, lengthwise in zip(layers, self.config.heads_with_length_temperature(), strict=True):
            attention = layer.self_attn
            if attention.temperature is not None:
                attention.temperature.lengthwise.copy_(torch.tensor(lengthwise))
            if isinstance(attention.prior, Window):
                attention.prior.width.copy_(Window(attention.prior.num_heads, self.config.window).width)
        if isinstance(hindsight := self.base_model.hindsight, Hindsight):
            hindsight.window.width.fill_(self.config.hindsight + 1)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As always, with a few lines that tell programs which have never heard of bayesattn where the code is.

        They load the folder with `trust_remote_code=True`.
        """
        self.config.auto_map = {
            "AutoConfig": f"{REMOTE}.BamConfig",
            "AutoModel": f"{REMOTE}.BamModel",
            "AutoModelForCausalLM": f"{REMOTE}.BamForCausalLM",
        }
        super().save_pretrained(save_directory, *args, **kwargs)
        if Path(save_directory).is_dir():  # not on other processes than the first
            (Path(save_directory) / f"{REMOTE}.py").write_text(REMOTE_CODE)


def _model_type(file: Path) -> str | None:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError):
        return None  # not there, or not readable: transformers says so


class BamModel(BamPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.shared_prior = make_prior(config, 0) if config.share_prior else None
        self.layers = nn.ModuleList(
            BamLayer(config, layer, self.shared_prior) for layer in range(config.num_hidden_layers)
        )
        self.hindsight = Hindsight(config) if config.hindsight else None
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config) if config.position == "rope" else None  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """An empty cache that keeps what the priors let matter, up to `tolerance` (the configuration's by default)."""
        tolerance = self.config.tolerance if tolerance is None else tolerance
        layers = [layer for layer in self.layers if isinstance(layer, BamLayer)]
        caches = [layer.self_attn.make_cache(tolerance) for layer in layers]
        return BayesCache(caches, None if self.hindsight is None else self.hindsight.make_cache())

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
        last: int | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last `last` positions, all by default.

        Without a cache, documents packed in a row are told apart by `document_ids`, or by `position_ids` that start at
        0 again, and the zeros of `attention_mask` are padding, before and after them. With one, padding is on the left,
        no gradients are carried, and the states between layers (`output_hidden_states`) are not kept.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        if output_attentions:
            raise ValueError("attention weights are never written out; `BamAttention.posterior` has those of a layer")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        last = None if last is None else min(last, tokens.shape[1])
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = self.make_cache()
        if past_key_values is not None and self.training and torch.is_grad_enabled():
            raise ValueError("a cache carries no gradients; train with use_cache=False")
        if past_key_values is not None and output_hidden_states:
            raise ValueError("the states between layers are not kept with a cache; ask for them with use_cache=False")
        if past_key_values is None:
            documents = document_numbers(tokens, attention_mask, position_ids, document_ids)
            if self.training and self.config.crowd and documents is not None and (documents < 0).any():
                raise ValueError("crowd and padding do not go together; pack the documents, or set crowd to 0")
            positions = positions_in_documents(tokens, documents) if position_ids is None else position_ids
            self._stretch(positions, fresh=True)
            x, rotary = self._embed(tokens, positions)
            states = [x]
            first, memory, later = len(self.layers) - self.config.reading_layers, None, None
            for number, layer in enumerate(self.layers):
                rows = last if number >= first else None
                if number == first and self.hindsight is not None:
                    later = self.hindsight.look_back(x, documents)
                given = x, rotary, documents, None, rows, memory, later
                memory = x if number == first else memory
                if self.gradient_checkpointing and self.training:
                    x = self._gradient_checkpointing_func(layer.__call__, *given)
                else:
                    x = layer(*given)
                if output_hidden_states:
                    states.append(x)
            x = self.norm(x)
            kept = (*states[:-1], x) if output_hidden_states else None  # the last one normed, as other models have it
            return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=kept)
        if document_ids is not None or starts_again(position_ids, attention_mask):
            raise ValueError("packed documents and a cache do not go together; call without past_key_values")
        x = self._read(tokens, attention_mask, past_key_values, last or tokens.shape[1])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)

    def _stretch(self, positions: Tensor, fresh: bool) -> None:
        """Set rotary frequencies that depend on the length of a text by its last position; a fresh one begins anew."""
        if self.rotary_emb is not None and self.rotary_emb.rope_type in ("dynamic", "longrope"):
            for position in ([torch.zeros_like(positions)] if fresh else []) + [positions]:
                self.rotary_emb(self.embed_tokens.weight, position)

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        x = tokens if tokens.is_floating_point() else self.embed_tokens(tokens)
        if self.config.position == "sinusoidal":
            # As large as the embeddings are when they are made, so that neither drowns the other.
            x = x + self.config.initializer_range * 2**0.5 * sinusoids(positions, x.shape[-1]).to(x.dtype)
        rotary = None if self.rotary_emb is None else _rotate(self.rotary_emb, x, positions.expand(len(x), -1))
        return x, rotary

    def _read(self, tokens: Tensor, attention_mask: Tensor | None, cache: BayesCache, last: int) -> Tensor:
        """Continue the cache's text, a chunk at a time through all layers."""
        if not isinstance(cache, BayesCache):
            raise TypeError(f"past_key_values is a {type(cache).__name__}; make one with model.make_cache()")
        if (cache.hindsight is None) != (self.hindsight is None):
            raise ValueError("past_key_values is of a model with other hindsight; make one with model.make_cache()")
        padding, before = left_padding(attention_mask, tokens), cache.get_seq_length()
        self._stretch(torch.tensor([[before + tokens.shape[1] - 1]], device=tokens.device), fresh=before == 0)
        if padding is not None and padding.any():
            if before:
                raise ValueError(
                    "attention_mask has zeros among tokens that continue a text; padding must be before it"
                )
            cache.pad_left(padding)
        rotary: list[Rotary | None] = [None]

        def embed(part: Tensor) -> Tensor:
            first = cache.caches[0].length
            positions = torch.arange(first, first + part.shape[1], device=part.device).unsqueeze(0)
            if (before := cache.caches[0].padding) is not None:
                positions = (positions - before.to(part.device)[:, None]).clamp(min=0)
            x, rotary[0] = self._embed(part, positions)
            return x

        later: list[Tensor | None] = [None]
        first = len(self.layers) - self.config.reading_layers

        def through(number: int, layer: nn.Module) -> Callable[..., Tensor]:
            def call(x: Tensor, layer_cache: LayerCache, rows: int, memory: Tensor | None = None) -> Tensor:
                if number == first and self.hindsight is not None:
                    later[0] = self.hindsight.look_back(x, None, cache.hindsight, layer_cache.length)
                return layer(x, rotary[0], None, layer_cache, rows, memory, later[0] if number >= first else None)

            return call

        return prefill(
            [through(number, layer) for number, layer in enumerate(self.layers)],
            cache.caches,
            tokens,
            embed=embed,
            last=last,
            chunk=CHUNK,
            reading=self.config.reading_layers,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


class BamForCausalLM(BamPreTrainedModel, GenerationMixin):
    """The language model: next-token logits, label loss, `generate()`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = False  # the loss is a mean over the batch at hand

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        self.generation_config.use_cache = True  # whether or not a plain call has one
        self.model = BamModel(config)
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
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, N, V]`, of the last `logits_to_keep` positions unless that is 0, or of the positions it lists.

        `labels` are the tokens themselves, −100 where nothing is to be learned; `loss_weights` `[B, N]` weigh them in
        the loss, which is a mean.
        """
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
            last=(logits_to_keep or None) if isinstance(logits_to_keep, int) and labels is None else None,
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
        """`generate` gets the cache that forgets, unless it is told which to use or to use none."""
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
