"""The pruning cache of an extended layer: keys without rotation, of near heads the last ones and the sinks alone.

What a near head cannot see is evicted, and nothing else. So attention is that of all keys, whatever the content.

Shape letters: B batch, H query heads, G key/value heads, g those of one call, M queries, n positions held, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesattn.adapt.extension import Extension, heads_of, in_order, queries_of
from bayesattn.adapt.layout import Layout
from bayesattn.adapt.parts import num_heads, prior_of, scales_prior, temperature_of
from bayesattn.attention import LayerCache
from bayesattn.attention.cache.state import State
from bayesattn.attention.cache.storage import Store
from bayesattn.errors import UserError
from bayesattn.models.attention import LayerPrior
from bayesattn.priors import Sinks, Uniform, Window
from bayesattn.priors.window import WIDEST


def make_extended_cache(layer: nn.Module, rollback: int) -> LayerCache:
    """An empty cache for an extended layer; its prior comes with the first keys."""
    if not isinstance(prior_of(layer), (Uniform, type(None))):
        raise UserError(
            f"{type(layer).__name__} is extended and has a prior besides, for which the pruning cache is not made; "
            "generate() with transformers' own cache"
        )
    return LayerCache(Uniform(num_heads(layer)), tolerance=0.0, content_spread=0.0, rollback=rollback)


def eviction_prior(extension: Extension, heads: int, kv_heads: int) -> LayerPrior:
    """The prior by which keys of a layer are evicted: windows and sinks of its near heads."""
    near, sinks = extension.settings.near_heads(extension.number, kv_heads), extension.settings.sinks
    if not near or sinks is None:
        return Uniform(heads)
    widths = [extension.settings.window if head in near else WIDEST for head in range(kv_heads)]
    return Sinks(Window(heads, [width for width in widths for _ in range(heads // kv_heads)]), sinks)


def attend_extended(
    layer: nn.Module, extension: Extension, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Add keys and values without rotation: the attention of their queries over all positions, `[B, H, M, E]`."""
    near = set(extension.settings.near_heads(extension.number, k.shape[1]))
    group = q.shape[1] // k.shape[1]

    def attend(state: State) -> Tensor:
        outs, order = [], []
        for store in state.storage.stores:
            members = store.heads.tolist()
            for looks_near in (True, False):
                places = [place for place, head in enumerate(members) if (head in near) == looks_near]
                if not places:
                    continue
                heads = [members[place] for place in places]
                keys, values, ids = _held(state, store, places, heads if looks_near else [])
                of_queries = queries_of(heads, group)
                outs.append(
                    extension.attend_to(
                        heads_of(q, of_queries), keys, values, None, Layout(keys.shape[2], ids), looks_near=looks_near,
                        query_heads=of_queries, temperature=temperature_of(layer, None),
                        scale_prior=scales_prior(layer), softmax_scale=cache.softmax_scale,
                    )
                )  # fmt: skip
                order += of_queries
        return in_order(outs, order)

    return cache.attend_by(attend, k, v)


def _held(
    state: State, store: Store, places: Sequence[int], with_sinks: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of some heads of a store, `[B, g, n, D]`, and ids that are −1 in padding.

    Sinks that are evicted from the store stand before the others, for heads that are named by their places in the
    layer. Then the first keys of each sequence are its sinks, and those are farther away than a window in any case.
    """
    k, v = (heads_of(x, places) for x in store.view())
    padding, ids = state.padding, None
    if padding is not None:
        padding = padding.to(k.device)[:, None]
        position = torch.arange(store.first, store.first + store.size, device=k.device)
        ids = torch.where(position < padding, -1, 0)
    if not store.first or not with_sinks:
        return k, v, ids
    sinks = state.sinks
    assert sinks is not None
    kept = [heads_of(x, with_sinks) for x in (sinks.k, sinks.v)]
    if padding is None:
        evicted = min(store.first, sinks.count)
        k, v = (torch.cat([first[:, :, :evicted], x], 2) for first, x in zip(kept, (k, v), strict=True))
        return k, v, None
    assert ids is not None
    # Right-aligned, so that the visible positions of a sequence have no gap.
    slot = torch.arange(sinks.count, device=k.device) - sinks.count + (store.first - padding).clamp(0, sinks.count)
    index = slot.clamp(min=0)[:, None, :, None]
    moved = [first.gather(2, index.expand(-1, first.shape[1], -1, first.shape[3])) for first in kept]
    k, v = (torch.cat([first, x], 2) for first, x in zip(moved, (k, v), strict=True))
    return k, v, torch.cat([torch.where(slot < 0, -1, 0), ids], 1)
