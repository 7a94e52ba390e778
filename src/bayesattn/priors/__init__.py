"""Priors over distance, one family a file."""

from bayesattn.priors.base import HeadSummary, Kind, Prior, Product
from bayesattn.priors.conditioned import ConditionedPrior, GivenPrior
from bayesattn.priors.conditioned_gaussian import ConditionedGaussian
from bayesattn.priors.fire import Fire
from bayesattn.priors.generalized_gaussian import GeneralizedGaussian
from bayesattn.priors.kerple import KerpleLog, KerplePower
from bayesattn.priors.laplace import Laplace, alibi_slopes
from bayesattn.priors.profile_bank import ProfileBank
from bayesattn.priors.sinks import GivenSinks, Sinks
from bayesattn.priors.t5 import T5Buckets
from bayesattn.priors.uniform import Uniform
from bayesattn.priors.window import Window

__all__ = [
    "ConditionedGaussian",
    "ConditionedPrior",
    "Fire",
    "GeneralizedGaussian",
    "GivenPrior",
    "GivenSinks",
    "HeadSummary",
    "KerpleLog",
    "KerplePower",
    "Kind",
    "Laplace",
    "Prior",
    "Product",
    "ProfileBank",
    "Sinks",
    "T5Buckets",
    "Uniform",
    "Window",
    "alibi_slopes",
]
