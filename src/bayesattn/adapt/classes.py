"""Classes of models with priors: each is a class of transformers whose configuration says which priors there are.

A model of transformers that loads weights it does not know drops them with a note. A model with priors therefore has
a class and a model type of its own: the constructor hangs the priors on before the weights are loaded, and a program
without bayesattn does not know the model type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import model_type_to_module_name

from bayesattn.adapt.attention_layers import attach, attention_layers
from bayesattn.adapt.cache import PriorCache, make_cache
from bayesattn.adapt.configuration import config_with_prior
from bayesattn.adapt.extension import ExtensionSettings, attach_extension
from bayesattn.adapt.layout import NAME
from bayesattn.adapt.parts import PRIOR, TEMPERATURE, num_heads
from bayesattn.adapt.structure import PriorSettings
from bayesattn.errors import UserError, check_flags

AUTO_CLASSES = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
_OURS = re.compile(rf"(^|\.)({PRIOR}|{TEMPERATURE})\.")


class ModelWithPrior(PreTrainedModel):
    """What the classes of models with priors share. Each also derives from a class of transformers, its base."""

    base_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        settings = PriorSettings.of(config.prior)
        with _in_float32():
            attach(self, settings)
        if settings.extension is not None:
            attach_extension(self, ExtensionSettings.of(settings.extension))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles refer to the base class, since the class of the model has no place of its own."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (self.base_class, self.config.base_class), *reduced[2:]

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As for other models, but priors that are missing or unexpected among the weights raise an error."""
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for kind, words in (("missing_keys", "lacks"), ("unexpected_keys", "has unknown")):
            if keys := sorted(key for key in info[kind] if _OURS.search(key)):
                raise UserError(f"{name} {words} weights of priors: {', '.join(keys[:8])}")
        return (model, info) if with_info else model

    @classmethod
    def is_custom_code(cls) -> bool:
        """As for the base class. transformers initialises what files do not have in fewer modules of custom code."""
        return cls.base_class.is_custom_code()

    def make_cache(self, tolerance: float = 1e-6, *, rollback: int = 0, full_prompt: bool = False) -> PriorCache:
        """An empty pruning cache for `past_key_values`: each head keeps the keys that a later query can need.

        If evicted keys could hold more than `tolerance` of any query's posterior mass, the call raises an error. Priors
        that fall fast, or end in a window, bound their heads; a uniform prior keeps everything. In an extended model,
        near heads keep their window and the first tokens, and nothing is missing.

        Args:
            tolerance: in [0, 1).
            rollback: how many tokens `crop` can take back at any time, as assisted generation does. They take memory.
            full_prompt: the queries of the first call see all keys before them, also those that windows hide. That
                call computes what the model computed before it had windows. Each layer then keeps what its windows
                allow, before the next layer is computed. Later calls are those of the model with windows, over keys
                and values that the original model has made. `tolerance` bounds what evicted keys could have changed
                in the later calls, and says nothing of the difference between the two ways to read a prompt. For
                windows alone.

        Raises:
            UserError: `full_prompt` with a prior that does more than hide keys, or with temperatures.
        """
        check_flags(full_prompt=full_prompt)
        layers = dict(sorted(attention_layers(self).items()))
        return make_cache(
            layers, [num_heads(layer) for layer in layers.values()], tolerance, rollback, full_prompt=full_prompt
        )

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        """The only attention implementation that has priors. transformers calls this for each that is chosen."""
        if attn_implementation not in (None, NAME):
            raise UserError(
                f"attn_implementation is {attn_implementation!r}, which has no priors; a model with priors needs "
                f"{NAME!r}, and bayesattn.remove_prior takes the priors away"
            )
        return NAME


def register_models(config_class: Any) -> None:
    """Let the Auto classes make models with priors for a configuration class with priors."""
    for auto in AUTO_CLASSES:
        base = _model_of(auto._model_mapping, config_class.base_class)
        if base is not None:
            auto.register(config_class, _model_class(base, config_class))


def _model_of(mapping: Any, config_class: Any) -> Any:
    """The class that an Auto class makes for a configuration, None if there is none.

    Some models have the configuration of their text part, and the Auto class knows them by that of the whole.
    """
    if config_class in mapping:
        models = mapping[config_class]
        return models[0] if isinstance(models, tuple) else models
    package = config_class.__module__.split(".")[-2]
    for model_type, name in mapping._model_mapping.items():
        if isinstance(name, str) and model_type_to_module_name(model_type) == package:
            model = mapping._load_attr_from_module(model_type, name)
            if model is not None and model.config_class is config_class:
                return model
    return None


def model_with_prior(base: Any, base_config: Any) -> type[ModelWithPrior]:
    """The class of `base` with priors, for models whose configuration is of the class `base_config`."""
    return _model_class(base, config_with_prior(base_config))


def _empty(base: Any, base_config: Any) -> ModelWithPrior:
    """A model without contents, for what unpickles or copies one."""
    made = model_with_prior(base, base_config)
    return made.__new__(made)


@contextmanager
def _in_float32() -> Iterator[None]:
    """New tensors are in float32, or in float64 if that is the default: distances need the precision.

    transformers makes a model in the precision it is loaded in, and gives loaded weights that of their place.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _model_class(base: Any, config_class: Any) -> type[ModelWithPrior]:
    name = f"{base.__name__}WithPrior"
    body = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} with priors on the attention layers.",
        "base_class": base,
        "config_class": config_class,
    }
    made = cast(type[ModelWithPrior], type(name, (ModelWithPrior, base), body))
    # Weights that transformers saves in another form than it loads are converted for our class as for its base.
    base_type = config_class.base_model_type
    mapping = get_checkpoint_conversion_mapping(base.__name__) or get_checkpoint_conversion_mapping(base_type)
    if mapping is not None:
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    return made
