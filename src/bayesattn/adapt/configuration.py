"""Configurations of models with priors: that of the base model, and what `add_prior` writes into it."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from bayesattn.errors import UserError, shown

MODEL_TYPE = "bayesattn"
# The section of a configuration file for the settings of the base model, and what stands above it.
SECTION = "base_config"
TOP_LEVEL = ("architectures", "base_model_type", "model_type", "prior", "transformers_version")
# What a class that does not know the section reads instead of a number of layers.
REFUSED = "this model has priors: import bayesattn and load it with an Auto class"


class PriorConfig(PreTrainedConfig):
    """The configuration of any model with priors: reading one gives the class made for its `base_model_type`."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of the base model, with the fields `prior` and `base_model_type`."""
        base = config_dict.get("base_model_type")
        if not isinstance(base, str) or base not in CONFIG_MAPPING:
            raise UserError(f"base_model_type is {shown(base)}; a model type that transformers has is needed")
        of_base: Any = CONFIG_MAPPING[base]
        return config_with_prior(of_base).from_dict(config_dict, **kwargs)


class ConfigWithPrior:
    """What the configuration classes of models with priors share. Each also derives from a class of transformers.

    In a file, the settings of the base model have a section of their own. If they stood where its class looks for them,
    that class would load the folder and drop the priors. It finds a sentence instead of the number of layers there.
    """

    base_class: ClassVar[type[PreTrainedConfig]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles refer to the base class, since this class has no place of its own."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (self.base_class,), *reduced[2:]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration, from a file with a section for the base model or from `to_dict()`."""
        section = config_dict.get(SECTION, {})
        if not isinstance(section, dict):
            raise UserError(f"{SECTION} in the configuration is {shown(section)}; a section of settings is needed")
        outside = {key: value for key, value in config_dict.items() if key != SECTION and value != REFUSED}
        return super().from_dict({**outside, **section}, **kwargs)  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        """What a file has."""
        content: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        top = {key: content.pop(key) for key in TOP_LEVEL if key in content}
        layers = type(self).attribute_map.get("num_hidden_layers", "num_hidden_layers")  # type: ignore[attr-defined]
        return {**top, layers: REFUSED, SECTION: content}


def _empty(base: Any) -> Any:
    """A configuration without contents, for what unpickles or copies one."""
    made = config_with_prior(base)
    return made.__new__(made)


@functools.cache
def config_with_prior(base: Any) -> Any:
    """The configuration class of `base` with priors; the Auto classes know its models."""
    if base.model_type not in CONFIG_MAPPING or CONFIG_MAPPING[base.model_type] is not base:
        raise UserError(f"{base.__name__} is not a configuration of transformers, so priors could not be saved with it")
    body = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} with priors on the attention layers.",
        "__annotations__": {"prior": Any, "base_model_type": Any},
        "model_type": MODEL_TYPE,
        "base_class": base,
        "prior": None,
        "base_model_type": base.model_type,
    }
    made = type(base.__name__.removesuffix("Config") + "WithPriorConfig", (ConfigWithPrior, base), body)
    import_module("bayesattn.adapt.classes").register_models(made)  # which takes longer than reading configurations
    return made


AutoConfig.register(MODEL_TYPE, PriorConfig)
