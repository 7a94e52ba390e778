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
from torch.nn.functional import cross_entropy, rms_norm, silu
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils.generic import can_return_tuple

from bayesattn.attention import LayerCache, bayesian_attention, prefill, visible_counts
from bayesattn.errors import UserError
from bayesattn.models.cache import BayesCache
from bayesattn.models.configuration import BamConfig
from bayesattn.models.packing import document_numbers, left_padding, positions_in_documents, starts_again
from bayesattn.models.shipped import resolve
from bayesattn.priors import (
    GeneralizedGaussian,
    KerpleLog,
    Laplace,
    Prior,
    ScalableSoftmax,
    T5Buckets,
    Uniform,
    Window,
)

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

Rotary = tuple[Tensor, Tensor]
# With the frequencies as they are: those that depend on the length are set for a whole text and not for each chunk.
_rotate = inspect.unwrap(LlamaRotaryEmbedding.forward)


def make_prior(config: BamConfig, layer: int) -> Prior:
    """The prior of one layer's heads."""
    heads = config.num_attention_heads
    if config.position == "bam":
        learn = ("alpha", "beta", "mu") if config.learn_centre else ("alpha", "beta")
        if isinstance(config.prior_init, str):
            return GeneralizedGaussian(heads, config.prior_init, learn, config.prior_epsilon)  # type: ignore[arg-type]
        beta, scale = zip(*config.prior_init[layer], strict=True)
        return GeneralizedGaussian.from_shape(beta, scale, learn=learn, epsilon=config.prior_epsilon)
    families: dict[str, Callable[[], Prior]] = {
        "alibi": lambda: Laplace(heads),
        "window": lambda: Window(heads, config.window),
        "kerple": lambda: KerpleLog(heads),
        "t5": lambda: T5Buckets(heads),
    }
    return families.get(config.position, lambda: Uniform(heads))()


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Sines and cosines of geometrically falling frequencies, [..., size]."""
    frequency = torch.exp(torch.arange(0, size, 2, device=positions.device) * (-math.log(10_000.0) / size))
    angle = positions.unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :size]


class BamAttention(nn.Module):
    """Projections, the layer's prior and temperatures."""

    def __init__(self, config: BamConfig, layer: int, prior: Prior | None = None) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert kv_heads is not None
        assert size is not None
        self.config, self.size = config, size
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.own_prior = make_prior(config, layer) if prior is None else None
        self._shared = [prior]  # in a list: the model registers it once
        lengthwise = config.heads_with_length_temperature()[layer]
        learned = any(lengthwise) or config.learned_temperature
        self.temperature = ScalableSoftmax(heads, config.temperature_init, lengthwise) if learned else None

    @property
    def prior(self) -> Prior:
        """The layer's own, or the one that all layers share."""
        prior = self.own_prior or self._shared[0]
        assert isinstance(prior, Prior)
        return prior

    def make_cache(self, tolerance: float) -> LayerCache:
        """An empty cache for this layer. Normalised queries and keys bound the content."""
        return LayerCache(
            self.prior,
            query_scale=self.temperature,
            scale_prior=self.config.scale_prior,
            tolerance=tolerance,
            content_spread=2.02 * self.size**0.5 if self.config.qk_norm else None,
        )

    def forward(
        self,
        asked: Tensor,
        x: Tensor,
        rotary: Rotary | None = None,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of `asked` `[B, M, C]`, the last M positions, to x `[B, N, C]`."""
        q, k, v = self.project(asked, x, rotary)
        if cache is not None:
            out = cache.attend(q, k, v)
        elif self.training and self.config.crowd and self.temperature is not None and self.temperature.lengthwise.any():
            out = self._attend_in_crowd(q, k, v, documents)
        else:
            out = self._attend(q, k, v, documents)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return bayesian_attention(
            q,
            k,
            v,
            self.prior,
            query_scale=self._temperatures(q, k, documents),
            scale_prior=self.config.scale_prior,
            document_ids=documents,
            tolerance=0.0 if self.training else self.config.tolerance,
        )

    def _attend_in_crowd(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attention whose heads with the length temperature, in the second half of each sequence, see others too.

        Keys of other sequences are as far away as its own: no distance tells them apart.
        """
        out = self._attend(q, k, v, documents)
        others = min(int(torch.randint(self.config.crowd + 1, ())), len(k) - 1)
        if not others:
            return out
        assert self.temperature is not None
        heads = self.temperature.lengthwise.nonzero().flatten()
        late, groups = (q.shape[2] + 1) // 2, q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1)[:, heads] for x in (k, v))
        keys, values = (torch.stack([x.roll(other, 0) for other in range(others + 1)], 2) for x in (k, v))
        position = torch.arange(k.shape[2], device=k.device)
        distance = position[-late:, None] - position
        hidden = (distance < 0)[None]
        if documents is not None:
            hidden = hidden | (documents[:, -late:, None] != documents[:, None])
        r = self._temperatures(q[:, :, -late:], k, documents, others + 1)
        assert r is not None
        r = r[..., heads, :, None, None]
        with torch.autocast(q.device.type, enabled=False):
            content = torch.einsum("bhmd,bhond->bhmon", q[:, heads, -late:].float(), keys.float()) / self.size**0.5
            prior = self.prior(distance.clamp(min=0))[heads, :, None]
            logits = r * (content + prior) if self.config.scale_prior else r * content + prior
            weights = logits.masked_fill(hidden[:, None, :, None], -torch.inf).flatten(3).softmax(-1)
            seen = weights @ values.float().flatten(2, 3)
        last = out[:, :, -late:].index_copy(1, heads, seen.to(out.dtype))
        return torch.cat([out[:, :, :-late], last], 2)

    def posterior(self, asked: Tensor, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """The weights `[B, H, M, N]` that `forward` mixes values with, written out: to look at."""
        q, k, _ = self.project(asked, x, rotary)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[-asked.shape[1] :, None] - position
        prior = self.prior(distance.clamp(min=0)).to(q.dtype)
        content = q @ k.mT / self.size**0.5
        r = self._temperatures(q, k, None)
        scale = 1.0 if r is None else r.unsqueeze(-1)
        logits = scale * (content + prior) if self.config.scale_prior else scale * content + prior
        return logits.masked_fill(distance < 0, -torch.inf).softmax(-1)

    def project(self, asked: Tensor, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `asked`, the last positions; keys and values of x."""
        rows = asked.shape[1]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q_proj(asked), self.k_proj(x), self.v_proj(x))
        )
        if self.config.qk_norm:
            q, k = rms_norm(q, (self.size,)), rms_norm(k, (self.size,))
        if rotary is not None:
            cos, sin = rotary
            _, k = apply_rotary_pos_emb(k, k, cos, sin)
            q, _ = apply_rotary_pos_emb(q, q, cos[:, cos.shape[1] - rows :], sin[:, sin.shape[1] - rows :])
        return q, k, v

    def _temperatures(self, q: Tensor, k: Tensor, documents: Tensor | None, times: int = 1) -> Tensor | None:
        """For so many times the keys that there are."""
        if self.temperature is None:
            return None
        counts = times * visible_counts(q.shape[2], k.shape[2], document_ids=documents, device=k.device)
        r = self.temperature(counts)
        jitter = self.config.temperature_jitter
        if not self.training or jitter is None:
            return r
        low, high = (math.log(factor) for factor in jitter)
        factor = torch.empty(len(k), 1, 1, device=k.device).uniform_(low, high).exp()
        factor = torch.where(torch.rand_like(factor) < 0.5, factor, 1.0)
        return torch.where(self.temperature.lengthwise[:, None], r * factor, r.expand(len(k), -1, -1))


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


class BamLayer(nn.Module):
    """Attention and SwiGLU, each after a norm and added to what came in."""

    def __init__(self, config: BamConfig, layer: int, prior: Prior | None = None) -> None:
        super().__init__()
        self.self_attn = BamAttention(config, layer, prior)
        self.mlp = BamMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
        rows: int | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """The last `rows` of x `[B, M, C]`, all by default, after a look at `memory` `[B, N, C]`, x itself by default.

        What x has are the last positions of the memory.
        """
        x_rows = x if rows is None else x[:, x.shape[1] - rows :]
        seen = self.input_layernorm(x if memory is None else memory)
        asked = seen[:, seen.shape[1] - x_rows.shape[1] :] if memory is None else self.input_layernorm(x_rows)
        x_rows = x_rows + self.self_attn(asked, seen, rotary, documents, cache)
        return x_rows + self.mlp(self.post_attention_layernorm(x_rows))


class BamPreTrainedModel(PreTrainedModel):
    """What the parts of the family share. `from_pretrained` also takes the name of a shipped model."""

    config_class = BamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BamLayer"]  # noqa: RUF012
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
        attentions = [module for module in self.modules() if isinstance(module, BamAttention)]
        for attention, lengthwise in zip(attentions, self.config.heads_with_length_temperature(), strict=True):
            if attention.temperature is not None:
                attention.temperature.lengthwise.copy_(torch.tensor(lengthwise))
            if isinstance(attention.prior, Window):
                attention.prior.width.copy_(Window(attention.prior.num_heads, self.config.window).width)

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
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config) if config.position == "rope" else None  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    def make_cache(self, tolerance: float | None = None) -> BayesCache:
        """An empty cache that keeps what the priors let matter, up to `tolerance` (the configuration's by default)."""
        tolerance = self.config.tolerance if tolerance is None else tolerance
        layers = [layer for layer in self.layers if isinstance(layer, BamLayer)]
        return BayesCache([layer.self_attn.make_cache(tolerance) for layer in layers])

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
            first, memory = len(self.layers) - self.config.reading_layers, None
            for number, layer in enumerate(self.layers):
                rows = last if number >= first else None
                given = x, rotary, documents, None, rows, memory
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

        def through(layer: nn.Module) -> Callable[..., Tensor]:
            return lambda x, layer_cache, rows, *memory: layer(x, rotary[0], None, layer_cache, rows, *memory)

        return prefill(
            [through(layer) for layer in self.layers],
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
