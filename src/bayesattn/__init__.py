"""Bayesian attention for PyTorch: positional encoding as a prior. Train short, read long."""

from importlib import import_module
from typing import Any

from bayesattn.attention import (
    Kernel,
    LayerCache,
    Plan,
    Problem,
    attention_plan,
    bayesian_attention,
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
    ScalableSoftmax,
    T5Buckets,
    Uniform,
    Window,
    alibi_slopes,
)

__version__ = "0.1.0.dev0"

# What needs more than torch is imported when it is first used.
_LATER = {
    "BamConfig": "bayesattn.models.configuration",
    "BamForCausalLM": "bayesattn.models.modeling",
    "BamModel": "bayesattn.models.modeling",
    "BayesCache": "bayesattn.models.cache",
    "load_tokenizer": "bayesattn.data.tokenizer",
}

__all__ = [
    "BamConfig",
    "BamForCausalLM",
    "BamModel",
    "BayesCache",
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
    "T5Buckets",
    "Uniform",
    "Window",
    "alibi_slopes",
    "attention_plan",
    "bayesian_attention",
    "load_tokenizer",
    "prefill",
    "register_kernel",
    "visible_counts",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
