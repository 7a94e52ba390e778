"""The pruning cache for models of transformers that have got a prior.

In these models `past_key_values.update(keys, values)` comes before attention, and the attention function never sees the
cache. So `update` gives the new keys back with the layer's cache as an attribute, which the attention function finds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.adapt.extended_cache import attend_extended, eviction_prior, make_extended_cache
from bayesattn.adapt.extension import extension_of
from bayesattn.adapt.layout import NAME, Layout
from bayesattn.adapt.own_bias import has_own_bias
from bayesattn.adapt.parts import prior_of, scales_prior, temperature_of
from bayesattn.adapt.query_prior import parameters_of, table_of
from bayesattn.attention import LayerCache, bayesian_attention
from bayesattn.attention.cache.spans import SpanLimits
from bayesattn.attention.cache.storage import Room
from bayesattn.errors import UserError
from bayesattn.models.attention import LayerPrior
from bayesattn.models.cache import BayesCache, BayesCacheLayer, is_cache_of
from bayesattn.priors import ConditionedPrior, Sinks, Uniform, Window
from bayesattn.priors.sinks import without_sinks

# Priors that `fit_priors` makes hold what is asked to a few positions, and heads of a layer differ much: less room than
# by default, and storage of their own for heads that free a tenth of what a call costs.
ROOM, LIMITS = Room(16, 32), SpanLimits(least_freed=64)
# Spans of windows are known without sums over all distances, so few are looked at until a text is longer.
LIMITS_OF_WINDOWS = replace(LIMITS, horizon=1024)
# Queries of a full prompt that the cache sees, so that it knows about how large their logits are.
SEEN = 64
# The attribute of keys that says which cache they go to.
_CACHE = "layer_cache"


class PriorCacheLayer(BayesCacheLayer):
    """The cache of one layer. Its keys go to the attention function, which adds them."""

    def __init__(self, cache: LayerCache, *, full_prompt: bool = False, is_extended: bool = False) -> None:
        super().__init__(cache)
        self.full_prompt = full_prompt  # whether the first call sees what windows hide
        self.is_extended = is_extended  # made for a layer that is extended
        self.window: int | None = None  # of the model, besides its priors
        self.is_waiting = False  # for the attention function

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._check_taken()
        marked: Any = key_states.view_as(key_states)
        setattr(marked, _CACHE, self)
        self.is_waiting = True
        return marked, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self._check_taken()
        return self.cache.length + query_length, 0

    def _check_taken(self) -> None:
        """Raise an error if the attention function has not found the cache."""
        if self.is_waiting:
            raise UserError(
                "keys went through the cache and not into attention: the model changes them in between, or a call "
                "was interrupted; take a new cache, or generate without one from make_cache()"
            )


class PriorCache(BayesCache):
    """A pruning cache for a model with priors; `model.make_cache()` makes it. After an error, take a new one."""

    def __init__(self, layers: list[PriorCacheLayer]) -> None:
        super().__init__([layer.cache for layer in layers])
        self.layers = list(layers)


def layer_cache(prior: LayerPrior, rollback: int = 0, **settings: Any) -> LayerCache:
    """The cache of a layer with this prior, and the settings of `LayerCache`."""
    is_window = isinstance(without_sinks(prior), (Uniform, Window))
    limits = LIMITS_OF_WINDOWS if is_window else LIMITS
    return LayerCache(prior, rollback=rollback, room=ROOM, limits=limits, **settings)


def make_cache(
    layers: dict[int, nn.Module], heads: list[int], tolerance: float, rollback: int, *, full_prompt: bool
) -> PriorCache:
    """An empty cache for these attention layers, numbered from 0, with so many query heads."""
    if list(layers) != list(range(len(layers))):
        raise UserError("some layers of the model have no attention; generate without a cache from make_cache()")
    if any(map(has_own_bias, layers.values())):
        raise UserError("layers of Inkling have more to keep than keys; generate without a cache from make_cache()")
    made = []
    for layer, count in zip(layers.values(), heads, strict=True):
        if extension_of(layer) is not None:
            if full_prompt:
                raise UserError("full_prompt is for windows such as fit_priors makes, and the model is extended")
            made.append(PriorCacheLayer(make_extended_cache(layer, rollback), is_extended=True))
            continue
        prior = prior_of(layer)
        if prior is None:
            prior = Uniform(count)
        if not isinstance(prior, LayerPrior):
            raise UserError(f"the prior is wrapped in a {type(prior).__name__}; take it out of that first")
        temperature = temperature_of(layer, None)
        cache = layer_cache(
            prior, rollback, query_scale=temperature, scale_prior=scales_prior(layer), tolerance=tolerance
        )
        if full_prompt:
            _check_hides_only(layer, prior)
        made.append(PriorCacheLayer(cache, full_prompt=full_prompt and not isinstance(prior, Uniform)))
    return PriorCache(made)


def _check_hides_only(layer: nn.Module, prior: LayerPrior) -> None:
    """Raise an error for a layer that is not the original one but for keys that windows hide."""
    inner, name = without_sinks(prior), type(layer).__name__
    has = None
    if not isinstance(inner, (Uniform, Window)):
        has = f"a {type(inner).__name__}"
    elif isinstance(prior, Sinks) and bool(prior.log_prior.any()):
        has = "sinks whose log-prior is not 0"
    elif temperature_of(layer, None) is not None:
        has = "temperatures"
    if has is not None:
        raise UserError(
            f"full_prompt is for windows, with sinks or without, such as fit_priors makes, and {name} has {has}; make "
            "the cache without it"
        )


def cache_of(key: Tensor) -> PriorCacheLayer | None:
    """The cache that `update` has marked these keys with."""
    return getattr(key, _CACHE, None)


def attend_with_cache(
    module: nn.Module,
    layer: PriorCacheLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scaling: float | None,
    states: Tensor | None,
) -> Tensor:
    """Add keys and values to the cache: the attention of their queries over all positions so far, `[B, H, M, E]`."""
    cache, reads_all = layer.cache, layer.full_prompt and not layer.cache.length
    if torch.is_grad_enabled() and q.requires_grad:
        raise UserError("a cache from make_cache() carries no gradients; use it with torch.no_grad()")
    if not cache.length:
        _prepare(module, layer, layout, scaling, k)
    elif (layout.window, scaling) != (layer.window, cache.softmax_scale):
        raise UserError("the layer's window or the scale of its logits changed while the cache was in use")
    elif layout.document_ids is not None and (layout.document_ids[:, cache.length] < 0).any():
        raise UserError("padding goes on after the first tokens that the cache got; give it all of the padding at once")
    extension = extension_of(module)
    if extension is not None:
        out = attend_extended(module, extension, cache, q, k, v)
        layer.is_waiting = False
        return out
    prior, parameters = without_sinks(prior_of(module)), None
    if isinstance(prior, ConditionedPrior):
        parameters = parameters_of(module, prior, states, lambda: _positions(cache, q.shape[2], q.device))
    out = cache.attend(q[:, :, -SEEN:] if reads_all else q, k, v, parameters)
    if reads_all:
        table = table_of(module, None, q, layout)
        out = bayesian_attention(q, k, v, table, softmax_scale=scaling, document_ids=layout.document_ids)
    layer.is_waiting = False
    return out


def _positions(cache: LayerCache, number: int, device: torch.device) -> Tensor:
    """Places of the next tokens in their documents, from 0: `[M]`, or `[B, M]` with padding."""
    positions = torch.arange(cache.length, cache.length + number, device=device)
    if cache.padding is None:
        return positions
    return (positions - cache.padding.to(device)[:, None]).clamp(min=0)


def _prepare(module: nn.Module, layer: PriorCacheLayer, layout: Layout, scaling: float | None, k: Tensor) -> None:
    """Give an empty cache what the first call says about the layer and the batch."""
    cache, prior, extension = layer.cache, prior_of(module), extension_of(module)
    fits = isinstance(cache.prior, Uniform) if prior is None else is_cache_of(cache, prior)
    if layer.is_extended != (extension is not None) or not (fits or layer.is_extended):
        raise UserError("past_key_values is the cache of another model; make one with model.make_cache()")
    cache.softmax_scale = scaling
    if extension is not None:
        if layout.window is not None:
            raise UserError(
                f"{type(module).__name__} is extended and has a sliding window, for which the pruning cache is not "
                "made; generate() with transformers' own cache, which is bounded there"
            )
        cache.prior = eviction_prior(extension, cache.prior.num_heads, k.shape[1]).to(k.device)
    elif layout.window is not None:
        layer.window = layout.window
        device = next(iter(module.parameters())).device
        window = Window(cache.prior.num_heads, layout.window).to(device)
        cache.prior = (
            cache.prior.over(cache.prior.prior * window) if isinstance(cache.prior, Sinks) else cache.prior * window
        )
        cache.query_scale = temperature_of(module, layout.window)
    if (ids := layout.document_ids) is not None:
        padding = ids < 0
        if ids.amax() > 0 or (padding[:, 1:] & ~padding[:, :-1]).any():
            raise UserError(f"{NAME!r} with a cache needs padding on the left, and no packed documents")
        cache.pad_left(padding.sum(1))
