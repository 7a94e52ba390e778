"""What the attention layers of our models have in common: a prior, temperatures, a cache, and a way to look inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from bayesattn.attention import LayerCache, ScalableSoftmax, bayesian_attention
from bayesattn.models.adapters import in_use
from bayesattn.priors import ConditionedPrior, GivenPrior, GivenSinks, Prior, Sinks
from bayesattn.priors.sinks import without_sinks

# The prior of a layer, and that of the queries at hand.
LayerPrior: TypeAlias = Prior | ConditionedPrior | Sinks
QueryPrior: TypeAlias = Prior | GivenPrior | Sinks | GivenSinks
# A layer, its queries, keys and values, their prior, and document ids, to the output [B, H, M, D].
Attend: TypeAlias = Callable[["DecoderAttention", Tensor, Tensor, Tensor, QueryPrior, Tensor | None], Tensor]


class DecoderAttention(nn.Module):
    """Base class of the attention layers of our models.

    A subclass has the projections, a property `prior`, and `config` with a `tolerance`. Its settings are those of
    `bayesian_attention`.
    """

    config: Any
    temperature: ScalableSoftmax | None
    softmax_scale: float | None = None
    attend_function: Attend | None = None

    @property
    def prior(self) -> LayerPrior:
        """Of the query heads."""
        raise NotImplementedError

    @property
    def distance_prior(self) -> Prior | ConditionedPrior:
        """That of the keys that are no sinks."""
        return without_sinks(self.prior)

    @property
    def scale_prior(self) -> bool:
        """Whether temperatures multiply the prior too."""
        return bool(getattr(self.config, "scale_prior", True))

    def make_cache(self, tolerance: float) -> LayerCache:
        """An empty cache for this layer."""
        return LayerCache(
            self.prior,
            query_scale=in_use(self.temperature),
            scale_prior=self.scale_prior,
            softmax_scale=self.softmax_scale,
            tolerance=tolerance,
            content_spread=self.content_spread(),
        )

    def content_spread(self) -> float | None:
        """A bound on how much the content of a key exceeds that of the likeliest one; None if there is none."""
        return None

    def attend_or_continue(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prior: QueryPrior,
        document_ids: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Attention of projected queries, keys and values, with what the cache has: `[B, M, H · D]`."""
        if cache is not None:
            given = prior.prior if isinstance(prior, GivenSinks) else prior
            out = cache.attend(q, k, v, given.parameters if isinstance(given, GivenPrior) else None)
        elif self.attend_function is not None:
            out = self.attend_function(self, q, k, v, prior, document_ids)
        else:
            out = self.attend(q, k, v, prior, document_ids)
        return out.transpose(1, 2).flatten(2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prior: QueryPrior,
        document_ids: Tensor | None,
        query_scale: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`bayesian_attention` with a prior and the layer's temperatures, or with another `query_scale`.

        Inside of a block of `attend_with`, the layer calls another function instead.
        """
        return bayesian_attention(
            q,
            k,
            v,
            prior,
            query_scale=query_scale or in_use(self.temperature),
            scale_prior=self.scale_prior,
            softmax_scale=self.softmax_scale,
            document_ids=document_ids,
            tolerance=0.0 if self.training else float(self.config.tolerance),
        )


@contextmanager
def attend_with(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let every attention layer of the model call `attend(layer, q, k, v, prior, document_ids)`, not its own `attend`.

    Measurements and training augmentation use it. Calls with a cache are not affected. `DecoderAttention.attend(layer,
    …)` is the layer's own attention.
    """
    layers = [module for module in model.modules() if isinstance(module, DecoderAttention)]
    before = [layer.attend_function for layer in layers]
    try:
        for layer in layers:
            layer.attend_function = attend
        yield
    finally:
        for layer, function in zip(layers, before, strict=True):
            layer.attend_function = function
