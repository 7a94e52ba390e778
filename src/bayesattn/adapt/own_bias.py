"""The prior that Inkling's own layers have: profiles over distance, which each query mixes.

Inkling writes its bias out for all pairs before attention, `[B, H, M, N]`. That module of it is made to return the
mixture alone, `[B, H, M, R]` for R profiles, which is what a `ProfileBank` calls parameters. The layer multiplies by
its temperature what the module returns, and the bias is linear in it, so the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from bayesattn.adapt.parts import ROPE_SHARE
from bayesattn.priors import GivenPrior, ProfileBank

# The module of an attention layer that writes its bias out.
BIAS = "rel_logits_proj"


def has_own_bias(layer: nn.Module) -> bool:
    """Whether it is an attention layer of Inkling."""
    return hasattr(layer, BIAS)


def keep_mixture(layer: nn.Module) -> None:
    """Let the layer's bias be the mixture of each query, not what it gives for each key."""
    if has_own_bias(layer):
        vars(getattr(layer, BIAS))["forward"] = _mixture


def write_out(model: nn.Module) -> None:
    """Let all layers write their bias out again."""
    for module in _with_mixture(model):
        del vars(module)["forward"]


def own_prior(layer: nn.Module, bias: Tensor | None) -> GivenPrior | None:
    """The prior that the layer's own bias is; None without one, or if its share is 0.

    Args:
        layer: an attention layer.
        bias: what the layer gives to its attention function, `[B, H, M, R]`.
    """
    share = getattr(layer, ROPE_SHARE, 1.0)
    if bias is None or share == 0:
        return None
    bank: Tensor = getattr(layer, BIAS).proj
    return GivenPrior(ProfileBank, bias.shape[1], bias if share == 1 else share * bias, (bank.unsqueeze(0),))


def gives_mixture(layer: nn.Module) -> bool:
    """Whether the layer's bias is a mixture."""
    return vars(getattr(layer, BIAS, layer)).get("forward") is _mixture


def _with_mixture(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if vars(module).get("forward") is _mixture)


def _mixture(relative_states: Tensor, *_: Any) -> Tensor:
    """`[B, M, H, R] -> [B, H, M, R]`. Where the queries and the keys stand does not matter."""
    return relative_states.transpose(1, 2)
