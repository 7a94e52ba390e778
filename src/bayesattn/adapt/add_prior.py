"""A prior for a model of transformers, in one line."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from bayesattn.adapt.attention_layers import (
    attention_layers,
    check_rope,
    hang,
    layers_with_prior,
    scale_rope,
    take_off,
)
from bayesattn.adapt.classes import ModelWithPrior, model_with_prior
from bayesattn.adapt.extension import take_off_extension
from bayesattn.adapt.layout import NAME
from bayesattn.adapt.own_bias import has_own_bias, write_out
from bayesattn.adapt.parts import num_heads
from bayesattn.adapt.query_prior import TWO_PRIORS, check_states
from bayesattn.adapt.softcap import WITH_SOFTCAP
from bayesattn.adapt.structure import PriorSettings, describe, describe_temperature
from bayesattn.attention import ScalableSoftmax
from bayesattn.errors import UserError, check_flags, is_number, is_whole, shown
from bayesattn.models.attention import LayerPrior
from bayesattn.priors import ConditionedPrior, Prior, Sinks
from bayesattn.priors.sinks import without_sinks

Position = Literal["keep", "drop"]


def add_prior(
    model: PreTrainedModel,
    prior: LayerPrior | Sequence[LayerPrior],
    query_scale: ScalableSoftmax | Sequence[ScalableSoftmax | None] | None = None,
    *,
    layers: Sequence[int] | None = None,
    position: Position = "keep",
    scale_prior: bool = True,
    shared: bool = False,
) -> PreTrainedModel:
    """Give the attention layers of a decoder of transformers a prior over distance: the same model, changed in place.

    With a uniform prior the model computes what it did. The prior and the temperature of a layer are its modules
    `prior` and `temperature`: they are among the parameters and the saved weights, and follow `.to`. The model gets a
    class of its own, so that `save_pretrained` and the Auto classes of transformers keep the priors; a program that has
    not imported bayesattn cannot load it.

    Add the prior before `torch.compile` and before PEFT, and name `modules_to_save=["prior", "temperature"]` there.

    Args:
        model: a model whose attention goes through transformers' AttentionInterface.
        prior: of the query heads of a layer, with `Sinks` or without. Each layer gets a copy. A sequence has one for
            each of the layers. Sinks are seen beyond a sliding window of the model, too. A conditioned prior is made
            from the input of its layer, of the width of the hidden states; `Fire` from positions in the document.
        query_scale: temperatures, as for `bayesian_attention`: a `ScalableSoftmax`, which is copied like the prior.
        layers: numbers of the layers that get a prior; all by default. The others compute what they did.
        position: `keep` leaves the model's own positional encoding; `drop` turns rotary positions off in the layers
            that get a prior, or the bias that Inkling has (`fade_position` sets what is between).
        scale_prior: as for `bayesian_attention`.
        shared: one prior and one temperature for all layers instead of copies.

    Returns:
        The model.

    Raises:
        UserError: one sentence, for a model without a supported attention, heads that do not match, and a model that
            has a prior.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}; a model of transformers is needed, before PEFT or torch.compile "
            "wraps it"
        )
    check_flags(scale_prior=scale_prior, shared=shared)
    if position not in ("keep", "drop"):
        raise UserError(f"position is {shown(position)}; 'keep' and 'drop' are allowed")
    if isinstance(model, ModelWithPrior) or any(layers_with_prior(model)):
        has = "has a prior" if any(layers_with_prior(model)) else "is extended"
        raise UserError(f"{type(model).__name__} {has} already; bayesattn.remove_prior(model) takes that away")
    modules = attention_layers(model)
    numbers = _check_layers(layers, modules)
    count = 1 if shared else len(numbers)
    priors = _one_for_each("prior", prior, count, "Prior", (Prior, ConditionedPrior, Sinks))
    temperatures = _one_for_each("query_scale", query_scale, count, "ScalableSoftmax", (ScalableSoftmax, type(None)))
    for place, number in enumerate(numbers):
        heads = num_heads(modules[number])
        for given in (priors[place % count], temperatures[place % count]):
            if given is not None and given.num_heads != heads:
                raise UserError(
                    f"{type(given).__name__} has {given.num_heads} heads and layer {number} of the model has {heads}; "
                    "they must agree"
                )
        _check_layer(modules[number], priors[place % count], position)
    settings = PriorSettings(
        layers=numbers,
        priors=_one_if_equal([describe(each) for each in priors]),
        temperatures=_one_if_equal([describe_temperature(each) for each in temperatures]),
        scale_prior=scale_prior,
        shared=shared,
        rope_share=0.0 if position == "drop" else 1.0,
    )
    before = model.config._attn_implementation
    made = model_with_prior(type(model), type(model.config))
    if settings.rope_share < 1:
        for number in numbers:  # before anything is changed, because it may raise an error
            check_rope(modules[number])
    device = next(iter(modules[numbers[0]].parameters())).device
    hang(
        model,
        settings,
        [each.to(device) for each in priors],
        [None if t is None else t.to(device) for t in temperatures],
    )
    replace_config(model, made.config_class, settings)
    vars(model)["attention_before"] = before
    model.__class__ = made
    model.set_attn_implementation(NAME)
    return model


def remove_prior(model: PreTrainedModel) -> PreTrainedModel:
    """Take priors, temperatures and the extension of `extend` away.

    The model, changed in place, is of its former class again.
    """
    if not isinstance(model, ModelWithPrior):
        raise UserError(f"the model is a {type(model).__name__}, which has no prior of add_prior")
    for layer in list(layers_with_prior(model)):
        take_off(layer)
    for layer in attention_layers(model).values():
        take_off_extension(layer)
    changed: Any = model
    changed.__class__ = changed.base_class
    replace_config(model, model.config.base_class, None)
    write_out(model)
    before = vars(model).pop("attention_before", None)
    model.set_attn_implementation(before or model.get_correct_attn_implementation(None, is_init_check=True))
    return model


def fade_position(model: PreTrainedModel, share: float) -> None:
    """Let the layers with a prior see this share of their rotary positions: 1 is all of them, 0 is `position="drop"`.

    The share s changes the cosines c and sines of all rotations to 1 + s·(c − 1) and s times the sines. Inkling has no
    rotations; its bias is multiplied by s. Call it with a
    share that falls over the steps of a training to give the model time to learn without them. It is saved with the
    model.
    """
    if not isinstance(model, ModelWithPrior):
        raise UserError(f"the model is a {type(model).__name__}, which has no prior of add_prior")
    if not is_number(share) or not 0 <= share <= 1:
        raise UserError(f"share is {shown(share)}; a number from 0 to 1 is needed")
    if model.config.prior.get("extension") is not None:
        raise UserError(f"{type(model).__name__} is extended, which needs all of its rotary positions")
    for layer in layers_with_prior(model):
        scale_rope(layer, float(share))
    model.config.prior["rope_share"] = float(share)


def _check_layers(layers: Sequence[int] | None, modules: dict[int, nn.Module]) -> list[int]:
    if layers is None:
        return list(modules)
    known = sorted(modules)
    numbers = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    if not numbers or not all(is_whole(each, 0, known[-1]) and each in modules for each in numbers):
        raise UserError(
            f"layers is {shown(layers)}; numbers of layers with attention, {known[0]} … {known[-1]}, are needed"
        )
    if len(set(numbers)) < len(numbers):
        raise UserError(f"layers is {shown(layers)}; each number may be there once")
    return numbers


def _check_layer(layer: nn.Module, prior: LayerPrior, position: Position) -> None:
    """Raise an error for a prior that this attention layer cannot have."""
    check_states(layer, prior)
    if position == "keep" and has_own_bias(layer) and isinstance(without_sinks(prior), ConditionedPrior):
        raise UserError(TWO_PRIORS.format(layer=type(layer).__name__))
    if isinstance(prior, Sinks) and getattr(layer, "attn_logit_softcapping", None) is not None:
        raise UserError(WITH_SOFTCAP.format(layer=type(layer).__name__))


def _one_for_each(name: str, given: Any, count: int, needed: str, kinds: tuple[type, ...]) -> list[Any]:
    """Copies of what is given for all layers, or of what is given for each."""
    if isinstance(given, kinds):
        return [copy.deepcopy(given) for _ in range(count)]
    listed = list(given) if isinstance(given, (Sequence, nn.ModuleList)) and not isinstance(given, str) else []
    if len(listed) != count or not all(isinstance(each, kinds) for each in listed):
        raise UserError(
            f"{name} is {shown(given)}; a {needed}, or a sequence of {count}, one for each layer, is needed"
        )
    return [copy.deepcopy(each) for each in listed]


def _one_if_equal(described: list[Any]) -> list[Any]:
    """One description if all are the same."""
    return described[:1] if all(each == described[0] for each in described) else described


def replace_config(model: PreTrainedModel, config_class: Any, settings: PriorSettings | None) -> None:
    """Give the model, and all modules that refer to its configuration, a copy of it with another class."""
    copies: dict[int, Any] = {}
    config: Any = copy.deepcopy(model.config, copies)
    config.__class__ = config_class
    if settings is not None:
        config.prior, config.base_model_type = settings.to_dict(), config_class.base_model_type
    else:
        del config.prior, config.base_model_type
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]
