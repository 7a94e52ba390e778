"""Priors over distance, one family a file."""

from bayesattn.priors.base import HeadSummary, Kind, Prior, Product
from bayesattn.priors.generalized_gaussian import GeneralizedGaussian
from bayesattn.priors.kerple import KerpleLog, KerplePower
from bayesattn.priors.laplace import Laplace, alibi_slopes
from bayesattn.priors.sinks import Sinks
from bayesattn.priors.t5 import T5Buckets
from bayesattn.priors.uniform import Uniform
from bayesattn.priors.window import Window

__all__ = [
    "GeneralizedGaussian",
    "HeadSummary",
    "KerpleLog",
    "KerplePower",
    "Kind",
    "Laplace",
    "Prior",
    "Product",
    "Sinks",
    "T5Buckets",
    "Uniform",
    "Window",
    "alibi_slopes",
]
