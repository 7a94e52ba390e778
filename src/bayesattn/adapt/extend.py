"""A rotary model of transformers reads past its training length, without training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bayesattn.adapt.add_prior import replace_config
from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.classes import ModelWithPrior, model_with_prior
from bayesattn.adapt.extension import (
    EXTENSION,
    LAWS,
    SINKS,
    Extension,
    ExtensionSettings,
    Head,
    hang_extension,
    take_off_extension,
)
from bayesattn.adapt.layout import NAME
from bayesattn.adapt.parts import ROTARY, num_heads, prior_of
from bayesattn.adapt.rotation import SUPPORTED, Rotation, at_position_zero, rotations
from bayesattn.adapt.structure import FAMILY, PriorSettings
from bayesattn.attention.scaling import FixedScaling
from bayesattn.errors import UserError, shown
from bayesattn.priors import Sinks

# Tokens of the text on which the extended model must say what the model says.
PROBE_TOKENS = 8
# The largest difference of their logits, relative to the largest logit; in half precision it may also be this share of
# what the rotations change.
OF_ALL = 0.25
MOST_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}

Temperature = Literal["log"] | FixedScaling | None


def extend(
    model: PreTrainedModel,
    window: int = 2048,
    temperature: Temperature = "log",
    *,
    group: int | None = None,
    sinks: int | None = None,
    near: Iterable[Head] | None = None,
    train_length: int | None = None,
) -> PreTrainedModel:
    """Let a rotary model read past its training length, without training: the same model, changed in place.

    Keys at a distance d < window keep their rotation. Keys from there on are all scored at the distance `window`: the
    query is rotated by `window`, the key not at all. Beyond the training length, query i is multiplied by

        max(1, log n_i / log n_train)        with n_i the number of keys that it sees,

    which keeps attention as sharp as it was. Texts of at most `window` tokens have the logits that they had. Both parts
    are exact and take memory linear in the number of tokens; gradients pass. Keys are cached without rotation, so that
    one cache serves both parts in `generate()`.

    Not all heads look far. `near` names those that do not: from the distance `window` on, they see only the first
    tokens. Then `model.make_cache()` keeps the last keys of these heads alone, and a long text takes memory where heads
    look far.

    The model gets a class of its own, as from `add_prior`, for `save_pretrained` and the Auto classes. Priors of
    `add_prior` may be there before; `remove_prior` takes them and the extension away.

    Args:
        model: a model with the rotary positions of Llama, whose attention goes through transformers'
            AttentionInterface.
        window: below the training length.
        temperature: "log" for the law above; another law of published models (`InklingScaling`, `Llama4Scaling`,
            `MistralScaling`), which has its own length; None for none.
        group: scores far keys at rotary positions in steps of this many tokens instead, as SelfExtend does.
        sinks: how many of the first tokens near heads see at any distance: attention to a window and sinks. By default
            4 with `near`; without it, all heads of a model with `sinks` are near heads.
        near: heads that look only near, as pairs of a layer's number and one of its key/value heads. `near_heads`
            chooses them on short text. Those of layers without rotary positions stay as they are.
        train_length: tokens that the model was trained to; `max_position_embeddings` by default.

    Returns:
        The model.

    Raises:
        UserError: one sentence, for a model without rotary positions or with rotations that are not known, which a
            short text shows; for a window beyond the training length; and for a model that is extended.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}; a model of transformers is needed, before PEFT or torch.compile "
            "wraps it"
        )
    before = PriorSettings.of(model.config.prior) if isinstance(model, ModelWithPrior) else None
    if before is not None and before.extension is not None:
        raise UserError(f"{type(model).__name__} is extended already; bayesattn.remove_prior(model) takes that away")
    if before is not None and before.rope_share < 1:
        raise UserError(f"{type(model).__name__} sees only a share of its rotary positions, so it cannot be extended")
    layers = attention_layers(model)
    if any(isinstance(prior_of(layer), Sinks) for layer in layers.values()):
        raise UserError(
            f"{type(model).__name__} has sinks, which fit_priors adds; bayesattn.remove_prior(model) takes them away, "
            "and extend(near=bayesattn.near_heads(model, prices)) uses the same prices"
        )
    ways = rotations(model, layers)
    length: Any = train_length
    if length is None:
        length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    heads = None if near is None else _pairs(near)
    settings = ExtensionSettings(
        window, length, tuple(layers), group=group, sinks=SINKS if sinks is None and heads is not None else sinks,
        near=heads,
    )  # fmt: skip
    settings.check()
    for number in {layer for layer, _ in heads or ()}:
        if number not in layers:
            raise UserError(f"near has layer {number}; the model has attention in layers {sorted(layers)}")
    settings = replace(settings, temperature=_describe(temperature, layers, length))
    made = None if before is not None else model_with_prior(type(model), type(model.config))
    implementation = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        settings = _hang(model, layers, ways, settings)
    except BaseException:
        for layer in layers.values():
            take_off_extension(layer)
        model.set_attn_implementation(implementation)
        raise
    if made is None:
        model.config.prior["extension"] = settings.to_dict()
        return model
    empty = PriorSettings(layers=[], priors=[], temperatures=[], extension=settings.to_dict())
    replace_config(model, made.config_class, empty)
    vars(model)["attention_before"] = implementation
    model.__class__ = made
    model.set_attn_implementation(NAME)
    return model


def extend_any(model: Any, window: int, **settings: Any) -> PreTrainedModel:
    """`extend`, also for models of ours with rotary positions, of which it makes a copy."""
    return extend(extensible(model), window, **settings)


def extensible(model: Any) -> Any:
    """A model of ours as one of transformers, which `extend` takes; others as they are."""
    if isinstance(model, PreTrainedModel) and model.config.model_type == "bam":
        from bayesattn.adapt.rope_models import as_transformers

        return as_transformers(model)  # type: ignore[arg-type]
    return model


def _pairs(near: object) -> tuple[Head, ...]:
    """Pairs of a layer and a head, whatever holds them; `ExtensionSettings.check` looks at what is in them."""
    try:
        pairs = {(index(layer), index(head)) for layer, head in near}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UserError(
            f"near is {shown(near)}; pairs of a layer's number and one of its key/value heads are needed"
        ) from None
    return tuple(sorted(pairs))


def _describe(temperature: Temperature, layers: dict[int, nn.Module], length: Any) -> dict[str, Any] | None:
    """A temperature as values of JSON."""
    if temperature is None:
        return None
    if isinstance(temperature, str) and temperature == "log":
        # log n / log N = 1 + log(n / N) / log N
        return {FAMILY: "InklingScaling", "strength": 1 / math.log(length), "length": length}
    if type(temperature) not in LAWS.values():
        raise UserError(f"temperature is {shown(temperature)}; 'log', a law ({', '.join(LAWS)}) or None is needed")
    assert isinstance(temperature, FixedScaling)
    for number, layer in layers.items():
        if num_heads(layer) != temperature.num_heads:
            raise UserError(
                f"{type(temperature).__name__} has {temperature.num_heads} heads and layer {number} of the model has "
                f"{num_heads(layer)}; they must agree"
            )
    return {
        FAMILY: type(temperature).__name__, "strength": temperature.strength, "length": temperature.length
    }  # fmt: skip


def _hang(
    model: PreTrainedModel, layers: dict[int, nn.Module], ways: dict[int, Rotation], settings: ExtensionSettings
) -> ExtensionSettings:
    """Extend the layers that rotate, and return the settings that name them.

    A text one token longer than a window has one far pair for each head, at the distance `window`, where both parts
    agree. So the model must say what it said, or its rotations are not what they seem.
    """
    name = type(model).__name__
    if model.device.type == "meta":
        raise UserError(f"{name} has no weights yet; extend it when they are loaded")
    unknown = f"{name} rotates its queries and keys in a way that is not known; {SUPPORTED}"
    number_of_tokens: Any = model.get_input_embeddings()
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device).unsqueeze(0) % number_of_tokens.num_embeddings
    with torch.no_grad(), _evaluating(model):
        calls: dict[int, dict[str, Any]] = {}
        wanted = _probe(model, layers, tokens, calls)
        chosen = tuple(number for number, given in calls.items() if _rotates(layers[number], given))
        if not chosen:
            raise UserError(f"{name} has no layer with rotary positions; {SUPPORTED}")
        settings = replace(settings, layers=chosen)
        probe = ExtensionSettings(window=PROBE_TOKENS - 1, length=PROBE_TOKENS, layers=chosen)
        for number in chosen:
            hang_extension(layers[number], Extension(probe, ways[number]))
        try:
            given = _probe(model, layers, tokens)
        except UserError:
            raise
        except Exception as problem:  # shapes that do not fit raise many types of errors
            raise UserError(unknown) from problem
        allowed = MOST_DIFFERENCE[wanted.dtype] * wanted.abs().max()
        if wanted.dtype in (torch.bfloat16, torch.float16):  # whose rounding errors depend on the model
            for number in chosen:
                vars(layers[number]).pop(EXTENSION)  # the layer still gets no rotations
            allowed = torch.maximum(allowed, OF_ALL * (_probe(model, layers, tokens) - wanted).abs().max())
        if not (given - wanted).abs().max() <= allowed:
            raise UserError(unknown)
    if settings.near is not None:
        settings = replace(settings, near=tuple(head for head in settings.near if head[0] in chosen))
    for number in chosen:
        vars(layers[number])[EXTENSION] = Extension(settings, ways[number], number)
    if settings.near:  # whose numbers are looked at when a layer attends
        with torch.no_grad(), _evaluating(model):
            _probe(model, layers, tokens)
    return settings


def _probe(
    model: PreTrainedModel, layers: dict[int, nn.Module], tokens: Tensor, calls: dict[int, dict[str, Any]] | None = None
) -> Tensor:
    """The logits of the model, or its hidden states; `calls` gets what each of the layers was called with."""
    hooks = []
    for number, layer in layers.items() if calls is not None else ():
        names = tuple(inspect.signature(type(layer).forward).parameters)[1:]

        def remember(_: nn.Module, args: Any, kwargs: Any, number: int = number, names: Any = names) -> None:
            assert calls is not None
            calls[number] = dict(zip(names, args, strict=False)) | kwargs

        hooks.append(layer.register_forward_pre_hook(remember, with_kwargs=True))
    try:
        output = model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    states: Tensor = output.logits if "logits" in output else output[0]
    return states


def _rotates(layer: nn.Module, given: dict[str, Any]) -> bool:
    """Whether the layer's output depends on its rotary positions."""
    return not torch.equal(layer(**given)[0], layer(**{**given, ROTARY: at_position_zero(given[ROTARY])})[0])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout for a while."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
