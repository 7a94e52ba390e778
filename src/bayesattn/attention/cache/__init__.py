"""The pruning cache: keys and values of one layer without those that no later query can need."""

from bayesattn.attention.cache.layer_cache import LayerCache
from bayesattn.attention.cache.prefill import prefill
from bayesattn.attention.cache.storage import Room

__all__ = ["LayerCache", "Room", "prefill"]
