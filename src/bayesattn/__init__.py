"""Bayesian attention for PyTorch: positional encoding as a prior. Train short, read long."""

from importlib import import_module
from typing import Any

from bayesattn.attention import (
    Kernel,
    LayerCache,
    Plan,
    Problem,
    ScalableSoftmax,
    Solution,
    attention_plan,
    attention_with_lse,
    bayesian_attention,
    posterior,
    prefill,
    register_kernel,
    visible_counts,
)
from bayesattn.priors import (
    GeneralizedGaussian,
    HeadSummary,
    KerpleLog,
    KerplePower,
    Laplace,
    Prior,
    Product,
    T5Buckets,
    Uniform,
    Window,
    alibi_slopes,
)

__version__ = "0.1.0.dev0"

# What needs more than torch is imported when it is first used.
_LAZY = {
    "BamConfig": "bayesattn.models.bam.configuration",
    "BamForCausalLM": "bayesattn.models.bam.modeling",
    "BamModel": "bayesattn.models.bam.modeling",
    "BayesCache": "bayesattn.models.cache",
    "DelayedKeysConfig": "bayesattn.models.delayed_keys.configuration",
    "DelayedKeysForCausalLM": "bayesattn.models.delayed_keys.modeling",
    "DelayedKeysModel": "bayesattn.models.delayed_keys.modeling",
    "load_model": "bayesattn.models.loading",
    "load_tokenizer": "bayesattn.data.tokenizer",
}

__all__ = [
    "BamConfig",
    "BamForCausalLM",
    "BamModel",
    "BayesCache",
    "DelayedKeysConfig",
    "DelayedKeysForCausalLM",
    "DelayedKeysModel",
    "GeneralizedGaussian",
    "HeadSummary",
    "Kernel",
    "KerpleLog",
    "KerplePower",
    "Laplace",
    "LayerCache",
    "Plan",
    "Prior",
    "Problem",
    "Product",
    "ScalableSoftmax",
    "Solution",
    "T5Buckets",
    "Uniform",
    "Window",
    "alibi_slopes",
    "attention_plan",
    "attention_with_lse",
    "bayesian_attention",
    "load_model",
    "load_tokenizer",
    "posterior",
    "prefill",
    "register_kernel",
    "visible_counts",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
