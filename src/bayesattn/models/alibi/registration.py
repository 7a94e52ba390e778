"""The model types of converted BLOOM, MPT and Falcon, for the Auto classes.

Their configurations derive from classes of transformers that cannot be imported while its Auto classes are being
imported, which is when our model types are registered. So light classes are registered, and reading a file makes the
configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig


class ConfigReader(PreTrainedConfig):
    """What the Auto classes know of a model type."""

    configuration: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration itself. Its models are imported too, and with that known to the Auto classes."""
        import_module("bayesattn.models.alibi.modeling")
        return getattr(import_module("bayesattn.models.alibi.configuration"), cls.configuration).from_dict(
            config_dict, **kwargs
        )


for kind in ("Bloom", "Mpt", "Falcon"):
    names = {"__module__": __name__, "model_type": f"bayes_{kind.lower()}", "configuration": f"Bayes{kind}Config"}
    AutoConfig.register(names["model_type"], type(f"Bayes{kind}Reader", (ConfigReader,), names))
