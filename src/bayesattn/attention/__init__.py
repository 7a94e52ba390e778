"""Attention whose weights are a posterior: the functions, the kernels and the cache."""

from bayesattn.attention.api import attention_plan, attention_with_lse, bayesian_attention, posterior
from bayesattn.attention.cache.layer_cache import LayerCache
from bayesattn.attention.cache.prefill import prefill
from bayesattn.attention.kernels.registry import Kernel, register_kernel
from bayesattn.attention.plan import Plan
from bayesattn.attention.problem import Problem, Solution, visible_counts
from bayesattn.attention.scaling import InklingScaling, Llama4Scaling, MistralScaling, ScalableSoftmax
from bayesattn.attention.self_attention import BayesianSelfAttention
from bayesattn.attention.sink_logit import SinkLogit

__all__ = [
    "BayesianSelfAttention",
    "InklingScaling",
    "Kernel",
    "LayerCache",
    "Llama4Scaling",
    "MistralScaling",
    "Plan",
    "Problem",
    "ScalableSoftmax",
    "SinkLogit",
    "Solution",
    "attention_plan",
    "attention_with_lse",
    "bayesian_attention",
    "posterior",
    "prefill",
    "register_kernel",
    "visible_counts",
]
