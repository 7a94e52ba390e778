"""The code of this model is in the package bayesattn."""

from bayesattn import DelayedKeysConfig, DelayedKeysForCausalLM, DelayedKeysModel

__all__ = ["DelayedKeysConfig", "DelayedKeysForCausalLM", "DelayedKeysModel"]
