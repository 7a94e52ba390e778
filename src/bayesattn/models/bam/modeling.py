"""The model of the BAM paper (arXiv 2505.22842), a causal language model for Hugging Face transformers.

Shape letters: B batch, N tokens, M the last of them, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bayesattn.attention import LayerCache
from bayesattn.models.attention import LayerPrior
from bayesattn.models.bam.attention import BamAttention, Rotary, make_prior
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.decoder import Decoder, DecoderForCausalLM
from bayesattn.models.pretrained import BayesPreTrainedModel
from bayesattn.priors import Window

# The unwrapped forward: frequencies that depend on the length are set once a text (`_set_length`), not per chunk.
_rotate = inspect.unwrap(LlamaRotaryEmbedding.forward)


def sinusoids(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sines and then cosines of geometrically falling frequencies, `[..., size]`, in float32 or better."""
    angle = _angles(positions, torch.arange(0, size, 2), size, dtype)
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :size]


def published_sinusoids(positions: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sines and cosines in turns, as in the paper's code: channel c has the frequency 10,000^(−c / size)."""
    angle = _angles(positions, torch.arange(size), size, dtype)
    return torch.where(torch.arange(size, device=angle.device) % 2 == 0, angle.sin(), angle.cos())


def _angles(positions: Tensor, exponents: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    frequency = torch.exp(exponents.to(positions.device, wide) * (-math.log(10_000.0) / size))
    return positions.unsqueeze(-1) * frequency


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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        published = self.config.weight_init == "published"
        if published and isinstance(module, nn.Linear):
            init.uniform_(module.weight, -(module.in_features**-0.5), module.in_features**-0.5)
        elif published and isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        else:
            super()._init_weights(module)

    def reset_config_buffers(self) -> None:
        """Set buffers to the configuration's values, whatever was loaded with the weights."""
        layers: Any = self.base_model.layers
        for layer, scalable in zip(layers, self.config.scalable_heads(), strict=True):
            attention = layer.self_attn
            if attention.temperature is not None:
                attention.temperature.grows_with_length.copy_(torch.tensor(scalable))
            if isinstance(prior := attention.distance_prior, Window):
                prior.width.copy_(Window(prior.num_heads, self.config.window).width)


class BamModel(BamPreTrainedModel, Decoder):
    """Tokens to hidden states."""

    def __init__(self, config: BamConfig) -> None:
        super().__init__(config)
        # Without padding_idx: its row would stay at zero, also where padding is another token's.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
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

    def _set_length(self, positions: Tensor, reset: bool) -> None:
        """Set rotary frequencies that depend on the length of a text by its last position; `reset` for a new text."""
        if self.rotary_emb is not None and self.rotary_emb.rope_type in ("dynamic", "longrope"):
            for position in ([torch.zeros_like(positions)] if reset else []) + [positions]:
                self.rotary_emb(self.embed_tokens.weight, position)

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        if self.shared_prior is not None and not isinstance(self.shared_prior, LayerPrior):
            raise ValueError(
                f"shared_prior is in a {type(self.shared_prior).__name__} that the layers, which share it, do not see; "
                "leave it out of modules_to_save and train it with requires_grad_()"
            )
        x = tokens if tokens.is_floating_point() else self.embed_tokens(tokens)
        if self.config.position == "sinusoidal" and self.config.sinusoids == "published":
            x = x + published_sinusoids(positions, x.shape[-1], x.dtype).to(x.dtype)
        elif self.config.position == "sinusoidal":
            # On the scale of newly initialised embeddings.
            x = x + self.config.initializer_range * 2**0.5 * sinusoids(positions, x.shape[-1], x.dtype).to(x.dtype)
        rotary = None if self.rotary_emb is None else _rotate(self.rotary_emb, x, positions.expand(x.shape[0], -1))
        return x, rotary


class BamForCausalLM(BamPreTrainedModel, DecoderForCausalLM):
    """The language model: next-token logits, label loss, `generate()`."""

    model_class: ClassVar[type[Decoder]] = BamModel


class BamForSequenceClassification(GenericForSequenceClassification, BamPreTrainedModel):
    """Logits `[B, num_labels]` of texts, from the hidden state of their last token. Padding may be on either side."""

    new_weights = ("score.",)


AutoModel.register(BamConfig, BamModel)
AutoModelForSequenceClassification.register(BamConfig, BamForSequenceClassification)
AutoModelForCausalLM.register(BamConfig, BamForCausalLM)
