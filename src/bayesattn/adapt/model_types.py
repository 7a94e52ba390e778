"""Our model types, known to transformers before the modules that define them are imported.

Importing those takes time, and may need parts of transformers that are still being imported. A stand-in for each
configuration class imports the real one when a configuration is read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

# Where the configuration class of each type is. Its module registers it, which replaces the stand-in.
HOMES = {
    "bam": "bayesattn.models.bam.configuration",
    "delayed_keys": "bayesattn.models.delayed_keys.configuration",
    "bayes_bloom": "bayesattn.models.alibi.configuration",
    "bayes_mpt": "bayesattn.models.alibi.configuration",
    "bayes_falcon": "bayesattn.models.alibi.configuration",
    "bayesattn": "bayesattn.adapt.configuration",
}


class StandIn(PreTrainedConfig):
    """In the place of a configuration class that is not imported yet."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real_class()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The real configuration."""
        return cls.real_class().from_dict(config_dict, **kwargs)

    @classmethod
    def real_class(cls) -> Any:
        """The configuration class, imported."""
        import_module(HOMES[cls.model_type])
        return CONFIG_MAPPING[cls.model_type]


def register() -> None:
    """Let transformers know each model type whose configuration class is not imported."""
    for name in HOMES:
        if name not in CONFIG_MAPPING:
            AutoConfig.register(name, type("StandIn", (StandIn,), {"model_type": name, "__module__": __name__}))


register()
