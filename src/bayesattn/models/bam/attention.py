"""The attention layer of a BAM model: projections, a prior over distance, temperatures.

Shape letters: B batch, H query heads, G key/value heads, N tokens, M the last of them, D head size, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bayesattn.attention import LayerCache, ScalableSoftmax, visible_counts
from bayesattn.models.adapters import in_use
from bayesattn.models.attention import DecoderAttention, LayerPrior, QueryPrior
from bayesattn.models.bam.configuration import CONDITIONED, BamConfig
from bayesattn.priors import (
    ConditionedGaussian,
    ConditionedPrior,
    Fire,
    GeneralizedGaussian,
    KerpleLog,
    Laplace,
    Prior,
    ProfileBank,
    Sinks,
    T5Buckets,
    Uniform,
    Window,
)

# Cosines and sines of the positions at hand, [B, N, D] each.
Rotary: TypeAlias = tuple[Tensor, Tensor]


def make_prior(config: BamConfig, layer: int) -> LayerPrior:
    """The prior of one layer's heads, with its sinks."""
    prior = _make_prior(config, layer)
    return Sinks(prior, config.sinks) if config.sinks else prior


def _make_prior(config: BamConfig, layer: int) -> Prior | ConditionedPrior:
    heads = config.num_attention_heads
    if config.position in CONDITIONED:
        return _make_conditioned(config)
    if config.position == "bam":
        learn = ("alpha", "beta", "mu") if config.learn_centre else ("alpha", "beta")
        if (placed := config.placed_heads(layer)) is None:
            return GeneralizedGaussian(heads, config.prior_init, learn, config.prior_epsilon)  # type: ignore[arg-type]
        beta, scale = zip(*placed, strict=True)
        return GeneralizedGaussian.from_shape(beta, scale, learn=learn, epsilon=config.prior_epsilon)
    if config.position == "window":
        return Window(heads, config.window)
    families: dict[str, Callable[[int], Prior]] = {
        "alibi": Laplace, "kerple": KerpleLog, "t5": T5Buckets, "nope": Uniform, "rope": Uniform, "sinusoidal": Uniform
    }  # fmt: skip
    return families[config.position](heads)


def _make_conditioned(config: BamConfig) -> ConditionedPrior:
    heads, width = config.num_attention_heads, config.hidden_size
    prior: ConditionedPrior
    if config.position == "cabam":
        prior = ConditionedGaussian(heads, width, config.prior_hidden)
    elif config.position == "profiles":
        prior = ProfileBank(heads, width, config.profile_rank, config.profile_extent or config.training_length)
    else:
        prior = Fire(heads, config.training_length, config.prior_hidden)
    for module in prior.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]  # by PyTorch's defaults, as published
    return prior


class BamAttention(DecoderAttention):
    """Bayesian attention with its projections.

    Args:
        config: of the model.
        prior: of the query heads, with sinks or without.
        scalable: which heads have Scalable Softmax.
        owns_prior: False for a prior that layers share; the model then owns it, and saves it once.
    """

    shared_prior: LayerPrior | None

    def __init__(self, config: BamConfig, prior: LayerPrior, scalable: Sequence[bool], owns_prior: bool = True) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert kv_heads is not None
        assert size is not None
        self.config, self.head_dim = config, size
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.own_prior = prior if owns_prior else None
        vars(self)["shared_prior"] = None if owns_prior else prior  # not registered here: the model owns it
        learned = any(scalable) or config.learned_temperature
        self.temperature = ScalableSoftmax(heads, config.temperature_init, scalable) if learned else None

    @property
    def prior(self) -> LayerPrior:
        """The layer's own, or the one that all layers share."""
        prior = in_use(self.own_prior or self.shared_prior)
        assert isinstance(prior, LayerPrior)
        return prior

    def content_spread(self) -> float | None:
        """Normalised queries and keys bound the content: twice √head_dim, and 1% for rounding."""
        return 2.02 * self.head_dim**0.5 if self.config.qk_norm else None

    def forward(
        self,
        query_states: Tensor,
        key_states: Tensor,
        rotary: Rotary | None = None,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of `query_states` `[B, M, C]`, the last M positions, to `key_states` `[B, N, C]`.

        With a cache, N counts the new tokens alone, and keys of earlier ones come from the cache.
        """
        q = self.project_queries(query_states, rotary)
        k, v = self.project_keys(key_states, rotary)
        prior = self.prior_of(query_states, k.shape[2], document_ids, cache)
        return self.o_proj(self.attend_or_continue(q, k, v, prior, document_ids, cache))

    def prior_of(
        self, query_states: Tensor, num_keys: int, document_ids: Tensor | None, cache: LayerCache | None
    ) -> QueryPrior:
        """The prior of the last positions: the layer's, with their states or positions if it depends on them."""
        prior, num_queries = self.prior, query_states.shape[1]
        if isinstance(self.distance_prior, Prior):
            assert isinstance(prior, Prior | Sinks)
            return prior
        if not isinstance(self.distance_prior, Fire):
            return prior.given(query_states)
        before = 0 if cache is None else cache.length
        counts = visible_counts(num_queries, before + num_keys, document_ids=document_ids, device=query_states.device)
        if cache is not None and cache.padding is not None:
            counts = counts - cache.padding.to(counts.device)[:, None]
        return prior.given((counts - 1).clamp(min=0))

    def project_queries(self, states: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Queries `[B, H, M, D]` of the last M positions."""
        q = self._normalise(self._split_heads(self.q_proj(states)))
        if rotary is not None:
            cos, sin = (x[:, x.shape[1] - states.shape[1] :] for x in rotary)
            q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        return q

    def project_keys(self, states: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, G, N, D]`."""
        k = self._normalise(self._split_heads(self.k_proj(states)))
        if rotary is not None:
            _, k = apply_rotary_pos_emb(k, k, *rotary)
        return k, self._split_heads(self.v_proj(states))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _normalise(self, x: Tensor) -> Tensor:
        return rms_norm(x, (self.head_dim,)) if self.config.qk_norm else x
