"""The cache of a model with delayed keys: one more layer, for the hidden states whose keys are not made yet."""

from __future__ import annotations

from collections.abc import Sequence

from bayesattn.attention import LayerCache
from bayesattn.models.cache import BayesCache


class DelayedKeysCache(BayesCache):
    """`BayesCache` with the latest hidden states, from which delayed keys are made."""

    def __init__(self, caches: Sequence[LayerCache], states: LayerCache) -> None:
        self.states = states
        super().__init__(caches)

    @property
    def all_caches(self) -> list[LayerCache]:
        return [*self.caches, self.states]
