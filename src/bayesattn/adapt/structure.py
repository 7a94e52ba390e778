"""What a configuration says about priors: their families and settings, so that they can be made again.

The numbers of a prior are saved with the model's weights. What is here is their structure, as values of JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from bayesattn.attention import ScalableSoftmax
from bayesattn.errors import UserError, shown
from bayesattn.models.attention import LayerPrior
from bayesattn.priors import ConditionedPrior, Prior, Sinks

FAMILY = "family"


@dataclass
class PriorSettings:
    """The field `prior` of a configuration: which layers have which prior, and what else `add_prior` was given."""

    layers: list[int]
    priors: list[dict[str, Any]]
    """One for each of the layers, or one for all."""
    temperatures: list[dict[str, Any] | None]
    """One for each of the layers, or one for all."""
    scale_prior: bool = True
    shared: bool = False
    rope_share: float = 1.0
    extension: dict[str, Any] | None = None
    """What `extend` was given, if the model is extended."""

    @classmethod
    def of(cls, given: object) -> PriorSettings:
        """From the field of a configuration, or an error."""
        known = {field.name for field in fields(cls)}
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict) or not {"layers", "priors", "temperatures"} <= given.keys() <= known:
            raise UserError(f"prior in the configuration is {shown(given)}; what add_prior writes there is needed")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return asdict(self)


def describe(prior: LayerPrior) -> dict[str, Any]:
    """The family and the settings of a prior, as values of JSON."""
    try:
        settings = prior.settings()
    except AttributeError as problem:
        raise UserError(
            f"{type(prior).__name__} does not keep its settings ({problem}); define settings(), the keyword arguments "
            "of its constructor, so that the model can be saved"
        ) from None
    values = {name: describe(value) if isinstance(value, LayerPrior) else value for name, value in settings.items()}
    return {FAMILY: type(prior).__name__, **values}


def make_prior(described: dict[str, Any]) -> LayerPrior:
    """A prior of the described family and settings; its numbers are those of a new one."""
    settings = dict(described)
    name = settings.pop(FAMILY, None)
    families: dict[str, Any] = {
        family.__name__: family for family in (*_families(Prior), *_families(ConditionedPrior), Sinks)
    }
    if name not in families:
        raise UserError(f"the prior family {shown(name)} is not known; import the module that defines it")
    values = {key: make_prior(value) if isinstance(value, dict) else value for key, value in settings.items()}
    try:
        prior: LayerPrior = families[name](**values)
    except TypeError as problem:
        raise UserError(f"the configuration of a prior does not fit {name}: {problem}") from None
    return prior


def describe_temperature(temperature: ScalableSoftmax | None) -> dict[str, Any] | None:
    """The settings of Scalable Softmax, as values of JSON."""
    if temperature is None:
        return None
    return {"num_heads": temperature.num_heads, "grows_with_length": temperature.grows_with_length.tolist()}


def make_temperature(described: dict[str, Any] | None) -> ScalableSoftmax | None:
    """Scalable Softmax with these settings; its numbers are those of a new one."""
    return None if described is None else ScalableSoftmax(**described)


def _families(family: type[Any]) -> Iterator[type[Any]]:
    """All subclasses, those of this package last, so that they win over others of the same name."""
    subclasses = sorted(family.__subclasses__(), key=lambda each: each.__module__.startswith("bayesattn."))
    for each in subclasses:
        yield from _families(each)
        yield each
