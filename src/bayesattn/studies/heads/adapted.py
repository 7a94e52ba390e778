"""Models that `add_prior` has given priors: what their heads have, and their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.backend import attend, attend_with
from bayesattn.adapt.classes import ModelWithPrior
from bayesattn.adapt.extension import extension_of
from bayesattn.adapt.layout import Layout
from bayesattn.adapt.parts import num_heads, prior_of, scales_prior, temperature_of
from bayesattn.attention import posterior
from bayesattn.errors import UserError
from bayesattn.priors import Prior, Sinks, Uniform, Window
from bayesattn.priors.sinks import without_sinks


@dataclass(frozen=True)
class AddedPrior:
    """The prior and the temperature of an attention layer, under the names that our own layers have for them."""

    prior: Any
    temperature: Any
    scale_prior: bool

    @property
    def distance_prior(self) -> Any:
        """That of the keys that are no sinks."""
        return without_sinks(self.prior)

    @property
    def sinks(self) -> Tensor | None:
        """Log-priors of the sinks, `[H, C]`."""
        return self.prior.log_prior if isinstance(self.prior, Sinks) else None


def is_adapted(model: object) -> bool:
    """Whether `add_prior` has given the model priors."""
    return isinstance(model, ModelWithPrior)


def added_priors(model: Any) -> dict[int, AddedPrior]:
    """Of all attention layers; one without a prior has a uniform one."""
    return {number: _of(layer, None) for number, layer in sorted(attention_layers(model).items())}


def _of(layer: nn.Module, window: int | None) -> AddedPrior:
    """The prior of a layer, with the model's own sliding window in it."""
    if extension_of(layer) is not None:
        raise UserError(f"{type(layer).__name__} is extended beyond its training length, so its attention has no table")
    prior = prior_of(layer) or Uniform(num_heads(layer))
    if not isinstance(prior, Prior | Sinks):
        raise UserError(f"the prior is a {type(prior).__name__}, which is another for every query, so it has no table")
    if window is not None:
        own = Window(prior.num_heads, window)
        prior = prior.over(without_sinks(prior) * own) if isinstance(prior, Sinks) else prior * own
    return AddedPrior(prior, temperature_of(layer, window), scales_prior(layer))


def weights_with_priors(model: Any, ids: Tensor) -> list[Tensor]:
    """Attention `[H, N, N]` of each layer on a text `[1, N]`."""
    weights: list[Tensor] = []

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Layout, **given: Any) -> Any:
        added = _of(module, mask.window)
        attention = posterior(
            q, k, added.prior, query_scale=added.temperature, scale_prior=added.scale_prior,
            softmax_scale=given.get("scaling"),
        )  # fmt: skip
        weights.append(attention[0].float().cpu())
        return attend(module, q, k, v, mask, **given)

    with attend_with(record), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return weights
