"""The prior-bounded cache as a Hugging Face `Cache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bayesattn.attention.cache.layer_cache import LayerCache


class BayesCacheLayer(CacheLayerMixin):
    """What `generate` asks of a layer's cache, answered by a `LayerCache`.

    An attention layer that knows this class calls `attend`. One that calls `update` gets keys and values back, for
    which the cache must keep the same positions for all heads (`same_positions=True`); `get_mask_sizes` says which.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: LayerCache) -> None:
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
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop got {tokens_to_remove}; the number of tokens to take back is given as a negative number"
            )
        self.cache.crop(self.cache.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.cache.reorder(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.cache.reorder(torch.arange(self.cache.batch)[indices.cpu()])

    def offload(self) -> None:
        raise NotImplementedError("a prior-bounded cache is small and stays on its device; offloading is not supported")


class BayesCache(Cache):
    """One `LayerCache` per layer, for `generate(past_key_values=…)` and for forward passes in pieces."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = list(caches)
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
        for cache in self.all_caches:
            cache.pad_left(padding)

    def __str__(self) -> str:
        return "\n".join(f"layer {number}: {cache}" for number, cache in enumerate(self.caches))
