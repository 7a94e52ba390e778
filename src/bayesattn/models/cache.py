"""The prior-bounded cache as a Hugging Face `Cache`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from bayesattn.attention.cache.layer_cache import LayerCache, unchanged_on_error
from bayesattn.errors import is_whole, shown

MOST_REPEATS = 2**20


def is_cache_of(cache: LayerCache, prior: nn.Module) -> bool:
    """Whether the cache is for a layer with this prior, or with one of the same values: a cache may be a loaded one."""
    if cache.prior is prior:
        return True
    own, other = cache.prior.state_dict(), prior.state_dict()
    same = type(cache.prior) is type(prior) and own.keys() == other.keys()
    return same and all(torch.equal(own[name].to(x.device), x) for name, x in other.items())


class BayesCacheLayer(CacheLayerMixin):
    """What `generate` asks of a layer's cache, answered by a `LayerCache`.

    An attention layer that knows this class calls `attend`. One that calls `update` gets keys and values back, for
    which the cache must keep the same positions for all heads (`same_positions=True`); `get_mask_sizes` says which.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: LayerCache) -> None:
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache is a {type(cache).__name__}; a LayerCache is needed")
        super().__init__()
        self.cache = cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerCache.attend`."""
        return self.cache.attend(q, k, v)

    @property
    def is_initialized(self) -> bool:
        return self.cache.length > 0

    @is_initialized.setter
    def is_initialized(self, _: bool) -> None:
        """The base class sets it; the cache knows better."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage comes with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(key_states, value_states)[:2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length - self.cache.first + query_length, self.cache.first

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if not is_whole(tokens_to_remove, -self.cache.length, 0):
            raise ValueError(
                f"crop got {shown(tokens_to_remove)}; the number of tokens to take back is given as a negative number, "
                f"here from {-self.cache.length:,} to 0"
            )
        self.cache.crop(self.cache.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not is_whole(repeats, 1, MOST_REPEATS):
            raise ValueError(f"repeats is {shown(repeats)}; a whole number from 1 to {MOST_REPEATS:,} is needed")
        if self.is_initialized:
            self.cache.reorder(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32, torch.bool):
            given = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices is {given}; a tensor of integers, or of True and False for each, is needed")
        try:
            chosen = torch.arange(self.cache.batch)[indices.cpu()]
        except IndexError:
            shape = f"{shown(indices.tolist())} of shape {list(indices.shape)}"
            raise ValueError(f"indices is {shape}; the cache has {self.cache.batch} sequences") from None
        self.cache.reorder(chosen)

    def offload(self) -> None:
        raise NotImplementedError("a prior-bounded cache is small and stays on its device; offloading is not supported")


class BayesCache(Cache):
    """One `LayerCache` per layer, for `generate(past_key_values=…)` and for forward passes in pieces.

    A method of all layers that raises an error changes none of them. `copy.deepcopy` is a cache that goes on by itself,
    for the same layers: it shares their priors and query scales.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = list(caches) if isinstance(caches, Sequence) else []
        if not self.caches or not all(isinstance(cache, LayerCache) for cache in self.all_caches):
            raise TypeError(f"caches is {shown(caches)}; a sequence of LayerCaches, one per layer, is needed")
        if len(set(map(id, self.all_caches))) < len(self.all_caches):
            raise ValueError(f"caches has one of its {len(self.caches)} caches twice; each layer needs its own")
        super().__init__(layers=[BayesCacheLayer(cache) for cache in self.all_caches])

    @property
    def all_caches(self) -> list[LayerCache]:
        """Those of the layers, and any that a model keeps beside them."""
        return self.caches

    @property
    def bytes(self) -> int:
        """Bytes held now, over all layers."""
        return sum(cache.bytes for cache in self.all_caches)

    @property
    def full_bytes(self) -> int:
        """Bytes that all keys and values so far would take."""
        return sum(cache.full_bytes for cache in self.caches)

    def pad_left(self, padding: Tensor | Sequence[int]) -> None:
        """`LayerCache.pad_left` for all layers."""
        with self.unchanged_on_error():
            for cache in self.all_caches:
                cache.pad_left(padding)

    def unchanged_on_error(self) -> AbstractContextManager[None]:
        """Around a forward pass: if it raises an error, the cache is what it was before."""
        return unchanged_on_error(self.all_caches)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not is_whole(layer_idx, 0, len(self.layers) - 1):
            raise ValueError(f"layer_idx is {shown(layer_idx)}; the cache has layers 0 … {len(self.layers) - 1}")
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        with self.unchanged_on_error():
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        with self.unchanged_on_error():
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self.unchanged_on_error():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        with self.unchanged_on_error():
            super().batch_select_indices(indices)

    def __str__(self) -> str:
        return "\n".join(f"layer {number}: {cache}" for number, cache in enumerate(self.caches))
