"""The layers of a BAM model: attention with its prior and temperatures, and what is around it.

Shape letters: B batch, H query heads, G key/value heads, N tokens, M the last of them, D head size, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bayesattn.attention import LayerCache, bayesian_attention, visible_counts
from bayesattn.models.configuration import BamConfig
from bayesattn.priors import (
    GeneralizedGaussian,
    KerpleLog,
    Laplace,
    Prior,
    Product,
    ScalableSoftmax,
    T5Buckets,
    Uniform,
    Window,
)

Rotary = tuple[Tensor, Tensor]


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


class BamAttention(nn.Module):
    """Projections, the layer's prior and temperatures.

    `layer` is its place among the model's, or None for attention beside them, which is given its prior.
    """

    def __init__(self, config: BamConfig, layer: int | None, prior: Prior | None = None) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert kv_heads is not None
        assert size is not None
        self.config, self.size = config, size
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        assert layer is not None or prior is not None
        self.own_prior = make_prior(config, layer) if layer is not None and prior is None else None
        self._shared = [prior]  # in a list: the model registers it once
        lengthwise = [False] * heads if layer is None else config.heads_with_length_temperature()[layer]
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
        later: Tensor | None = None,
        rotary: Rotary | None = None,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of `asked` `[B, M, C]`, the last M positions, to x `[B, N, C]`; with hindsight, to `later`."""
        q, k, v = self.project(asked, x, later, rotary)
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
        """Attention whose heads with the length temperature, in the last quarter of each sequence, see others too.

        Sequences stand together in groups, of 1, 2, 4 … as it comes, and see all keys of their group. Keys of others
        are as far away as its own: no distance tells them apart.
        """
        out = self._attend(q, k, v, documents)
        size = 2 ** int(torch.randint(min(self.config.crowd + 1, len(k)).bit_length(), ()))
        if size == 1:
            return out
        assert self.temperature is not None
        heads, whole = self.temperature.lengthwise.nonzero().flatten(), len(k) // size * size
        late, groups = (q.shape[2] + 3) // 4, q.shape[1] // k.shape[1]
        position = torch.arange(k.shape[2], device=k.device)
        distance = position[-late:, None] - position
        hidden = (distance < 0).expand(len(k), -1, -1)
        if documents is not None:
            hidden = hidden | (documents[:, -late:, None] != documents[:, None])
        r = self._temperatures(q[:, :, -late:], k, documents, size)
        assert r is not None
        r = r.expand(len(k), -1, -1)[:, heads, :, None].float()
        prior = self.prior(distance.clamp(min=0))[heads]
        never = prior.isneginf()
        prior = prior.masked_fill(never, 0.0)  # an infinite one times r has no gradient
        prior = (r * prior if self.config.scale_prior else prior).masked_fill(hidden[:, None] | never, -torch.inf)

        def together(x: Tensor) -> Tensor:  # [B, H, N, D] to [B / size, H, size N, D]
            return x[:whole].float().unflatten(0, (-1, size)).transpose(1, 2).flatten(2, 3)

        with torch.autocast(q.device.type, enabled=False):
            k, v = (together(x.repeat_interleave(groups, 1)[:, heads]) for x in (k, v))
            logits = together(q[:, heads, -late:] * (r / self.size**0.5)) @ k.mT
            logits = logits.unflatten(-1, (size, -1)) + together(prior).unsqueeze(-2)
            seen = logits.flatten(-2).softmax(-1) @ v
        seen = seen.unflatten(2, (size, -1)).transpose(1, 2).flatten(0, 1)
        last = out[:whole, :, -late:].index_copy(1, heads, seen.to(out.dtype))
        last = torch.cat([last, out[whole:, :, -late:]])
        return torch.cat([out[:, :, :-late], last], 2)

    def posterior(self, asked: Tensor, x: Tensor, later: Tensor | None = None, rotary: Rotary | None = None) -> Tensor:
        """The weights `[B, H, M, N]` that `forward` mixes values with, written out: to look at."""
        q, k, _ = self.project(asked, x, later, rotary)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[-asked.shape[1] :, None] - position
        prior = self.prior(distance.clamp(min=0)).to(q.dtype)
        content = q @ k.mT / self.size**0.5
        r = self._temperatures(q, k, None)
        scale = 1.0 if r is None else r.unsqueeze(-1)
        logits = scale * (content + prior) if self.config.scale_prior else scale * content + prior
        return logits.masked_fill(distance < 0, -torch.inf).softmax(-1)

    def project(
        self, asked: Tensor, x: Tensor, later: Tensor | None, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `asked`, the last positions; keys and values of x, those of heads with hindsight of `later`."""
        rows = asked.shape[1]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q_proj(asked), self._of(self.k_proj, x, later), self._of(self.v_proj, x, later))
        )
        if self.config.qk_norm:
            q, k = rms_norm(q, (self.size,)), rms_norm(k, (self.size,))
        if rotary is not None:
            cos, sin = rotary
            _, k = apply_rotary_pos_emb(k, k, cos, sin)
            q, _ = apply_rotary_pos_emb(q, q, cos[:, cos.shape[1] - rows :], sin[:, sin.shape[1] - rows :])
        return q, k, v

    def _of(self, projection: nn.Linear, x: Tensor, later: Tensor | None) -> Tensor:
        if later is None:
            return projection(x)
        if self.config.hindsight_heads is None:
            return projection(later)
        chosen = torch.zeros(projection.out_features // self.size, dtype=torch.bool, device=x.device)
        chosen[self.config.hindsight_heads] = True
        return torch.where(chosen.repeat_interleave(self.size), projection(later), projection(x))

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

    def __init__(self, config: BamConfig, layer: int | None, prior: Prior | None = None) -> None:
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
        later: Tensor | None = None,
    ) -> Tensor:
        """The last `rows` of x `[B, M, C]`, all by default, after a look at `memory` `[B, N, C]`, x itself by default.

        What x has are the last positions of the memory. Heads with hindsight look at `later` instead.
        """
        x_rows = x if rows is None else x[:, x.shape[1] - rows :]
        seen = self.input_layernorm(x if memory is None else memory)
        asked = seen[:, seen.shape[1] - x_rows.shape[1] :] if memory is None else self.input_layernorm(x_rows)
        later = None if later is None else self.input_layernorm(later)
        x_rows = x_rows + self.self_attn(asked, seen, later, rotary, documents, cache)
        return x_rows + self.mlp(self.post_attention_layernorm(x_rows))


class Hindsight(BamLayer):
    """The state of each token once more, when so many others have followed: a layer that reads backwards.

    A causal model cannot mark a token with what comes after it, such as a number with the name that follows. But a
    query may come later still: a key can be made when the next tokens are known, if it is seen only from then on.
    """

    def __init__(self, config: BamConfig) -> None:
        heads, after = config.num_attention_heads, config.hindsight
        scales = [after ** (head / max(1, heads - 1)) for head in range(heads)]
        near = GeneralizedGaussian.from_shape([1.0] * heads, scales, epsilon=config.prior_epsilon)
        super().__init__(config, None, near * Window(heads, after + 1))
        self.prior, self.after = self.self_attn.prior, after

    @property
    def window(self) -> Window:
        """What keeps it from looking further ahead than it may."""
        assert isinstance(self.prior, Product)
        assert isinstance(self.prior.second, Window)
        return self.prior.second

    def make_cache(self) -> LayerCache:
        """For the states of the tokens that the next ones are the hindsight of."""
        window = Window(1, self.after + 1).to(self.input_layernorm.weight.device)
        return LayerCache(window, tolerance=0.0, content_spread=0.0, together=True)

    def look_back(
        self,
        x: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
        position: int | None = None,
    ) -> Tensor:
        """At each position of x `[B, N, C]` the token so many before, which has seen all up to here.

        Zeros where there is none in the same document. A cache has the positions before x, which starts at `position`.
        """
        rows = x.shape[1]
        documents = x.new_zeros(x.shape[:2], dtype=torch.long) if documents is None else documents.long()
        if cache is not None:
            states, *_ = cache.update(x[:, None], x[:, None, :, :0], position=position)
            x = states[:, 0, -(self.after + rows) :]
            place = torch.arange(cache.length - x.shape[1], cache.length, device=x.device)
            padding = torch.zeros(len(x), dtype=torch.long) if cache.padding is None else cache.padding
            documents = torch.where(place < padding.to(x.device)[:, None], -1, 0)
        missing = self.after + rows - x.shape[1]
        x, documents = pad(x, (0, 0, missing, 0)), pad(documents, (missing, 0), value=-1)
        seen = self(x.flip(1), None, documents.flip(1), None, rows).flip(1)
        there = (documents[:, :rows] == documents[:, self.after :]) & (documents[:, :rows] >= 0)
        return seen * there.to(seen.device).unsqueeze(-1)
