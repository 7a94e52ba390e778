"""The pruning cache: keys and values of one layer without those that no later query can need."""

from bayesattn.attention.cache.layer_cache import LayerCache
from bayesattn.attention.cache.prefill import prefill

__all__ = ["LayerCache", "prefill"]
