"""Bayesian attention for PyTorch: positional encoding as a prior. Train short, read long."""

from bayesattn.attention import Kernel, Problem, bayesian_attention, register_kernel, visible_counts
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

__all__ = [
    "GeneralizedGaussian",
    "HeadSummary",
    "Kernel",
    "KerpleLog",
    "KerplePower",
    "Laplace",
    "Prior",
    "Problem",
    "Product",
    "ScalableSoftmax",
    "T5Buckets",
    "Uniform",
    "Window",
    "alibi_slopes",
    "bayesian_attention",
    "register_kernel",
    "visible_counts",
]
