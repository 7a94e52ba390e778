"""The code of this model is in the package bayesattn."""

from bayesattn import BamConfig, BamForCausalLM, BamModel

__all__ = ["BamConfig", "BamForCausalLM", "BamModel"]
