"""The attention layers of a model of transformers, and the prior that each may have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from bayesattn.adapt.own_bias import has_own_bias, keep_mixture
from bayesattn.adapt.parts import OWNER, PRIOR, ROPE_SHARE, ROTARY, SCALE_PRIOR, SUPPORTED, TEMPERATURE, hooks_of
from bayesattn.adapt.query_prior import pass_states, reads_states, stop_states
from bayesattn.adapt.structure import PriorSettings, make_prior, make_temperature
from bayesattn.attention import ScalableSoftmax
from bayesattn.errors import UserError
from bayesattn.models.attention import LayerPrior

# What the code of an attention layer refers to if it lets attn_implementation choose its attention function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The causal self-attention layers that choose their attention function, by the number of their layer.

    Raises:
        UserError: if there are none, or if the model has an encoder and a decoder.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} has an encoder and a decoder; {SUPPORTED}")
    layers = [
        module
        for module in model.modules()
        if not isinstance(module, PreTrainedModel) and _chooses(type(module)) and _looks_back(module)
    ]
    if not layers:
        raise UserError(f"{name} has no attention that a prior could be added to; {SUPPORTED}")
    numbers = [getattr(layer, "layer_idx", None) for layer in layers]
    if None in numbers or len(set(numbers)) < len(numbers):  # several stacks of layers: counted through
        numbers = list(range(len(layers)))
    return dict(zip(numbers, layers, strict=True))  # type: ignore[arg-type]


def _chooses(cls: type[Any]) -> bool:
    """Whether a method of the class refers to the attention interface."""
    own = (each for each in cls.__mro__ if not each.__module__.startswith(("torch.", "builtins")))
    methods = (inspect.unwrap(value) for each in own for value in vars(each).values() if callable(value))
    return any(INTERFACE in method.__code__.co_names for method in methods if hasattr(method, "__code__"))


def _looks_back(module: nn.Module) -> bool:
    """Whether it is causal attention of a text to itself."""
    return getattr(module, "is_causal", True) and not getattr(module, "is_cross_attention", False)


def attach(model: PreTrainedModel, settings: PriorSettings) -> None:
    """Hang new priors and temperatures with these settings on the model's attention layers."""
    count = len(settings.layers)
    alike = settings.shared
    priors = [make_prior(each) for each in _each(settings.priors, 1 if alike else count)]
    temperatures = [make_temperature(each) for each in _each(settings.temperatures, 1 if alike else count)]
    hang(model, settings, priors, temperatures)


def hang(
    model: PreTrainedModel,
    settings: PriorSettings,
    priors: list[LayerPrior],
    temperatures: list[ScalableSoftmax | None],
) -> None:
    """Hang these priors and temperatures on the model's attention layers: one for each, or the first one for all."""
    layers = attention_layers(model)
    if wrong := [number for number in settings.layers if number not in layers]:
        raise UserError(f"the model has no attention in layer {wrong[0]}; it has some in {sorted(layers)}")
    for layer in layers.values():
        keep_mixture(layer)
    owner = layers[settings.layers[0]] if settings.layers else None
    for place, number in enumerate(settings.layers):
        layer = layers[number]
        if settings.shared and layer is not owner:
            vars(layer)[OWNER] = owner  # not registered: it is saved once
        else:
            layer.add_module(PRIOR, priors[place])
            layer.add_module(TEMPERATURE, temperatures[place])
        if reads_states(priors[0 if settings.shared else place]):
            pass_states(layer)
        setattr(layer, SCALE_PRIOR, settings.scale_prior)
        if settings.rope_share < 1:
            scale_rope(layer, settings.rope_share)


def layers_with_prior(model: nn.Module) -> Iterator[nn.Module]:
    """The attention layers that have a prior, their own or that of another layer."""
    for module in model.modules():
        if hasattr(module, SCALE_PRIOR) and (hasattr(module, PRIOR) or hasattr(module, OWNER)):
            yield module


def take_off(layer: nn.Module) -> None:
    """Take everything that `hang` has put on a layer."""
    for name in (PRIOR, TEMPERATURE):
        layer._modules.pop(name, None)
    for name in (OWNER, SCALE_PRIOR, ROPE_SHARE):
        vars(layer).pop(name, None)
    stop_states(layer)
    for number in hooks_of(layer, _with_scaled_rope):
        del layer._forward_pre_hooks[number], layer._forward_pre_hooks_with_kwargs[number]


def check_rope(layer: nn.Module) -> None:
    """Raise an error for a layer whose rotary positions, or other prior of its own, cannot be dropped."""
    if has_own_bias(layer):
        return
    if ROTARY not in inspect.signature(inspect.unwrap(type(layer).forward)).parameters:
        raise UserError(
            f"{type(layer).__name__} does not get its rotary positions as {ROTARY!r}, so they cannot be dropped; use "
            "position='keep'"
        )


def scale_rope(layer: nn.Module, share: float) -> None:
    """Let a layer see this share of its rotation, or of its own bias: 1 is all, 0 none."""
    check_rope(layer)
    setattr(layer, ROPE_SHARE, share)
    if not has_own_bias(layer) and not hooks_of(layer, _with_scaled_rope):
        names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
        layer.register_forward_pre_hook(partial(_with_scaled_rope, names), with_kwargs=True)


def _with_scaled_rope(names: tuple[str, ...], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get(ROTARY) is None:
        return None
    return (), {**given, ROTARY: _towards_none(given[ROTARY], getattr(layer, ROPE_SHARE))}


def _towards_none(rotary: Any, share: float) -> Any:
    """Cosines towards 1 and sines towards 0; complex numbers, which some models have, towards 1."""
    if isinstance(rotary, Tensor):
        return 1 + share * (rotary - 1)
    cosines, sines = rotary
    return 1 + share * (cosines - 1), share * sines


def _each(described: list[Any], count: int) -> list[Any]:
    """The descriptions, one for each of so many; one stands for all."""
    if len(described) not in (1, count):
        raise UserError(f"prior in the configuration has {len(described)} entries for {count} layers")
    return described * count if len(described) == 1 else described
