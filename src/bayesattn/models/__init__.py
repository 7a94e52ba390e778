"""Models of Bayesian attention for Hugging Face transformers, and how any causal model is loaded."""

# Configurations are registered with transformers' Auto classes when this package is imported.
from bayesattn.models.alibi import registration  # noqa: F401
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.delayed_keys.configuration import DelayedKeysConfig

__all__ = ["BamConfig", "DelayedKeysConfig"]
