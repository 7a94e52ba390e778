"""How a posterior is computed."""

from bayesattn.attention.api import attention_plan, bayesian_attention
from bayesattn.attention.cache import LayerCache
from bayesattn.attention.kernels import Kernel, register_kernel
from bayesattn.attention.plan import Plan
from bayesattn.attention.prefill import prefill
from bayesattn.attention.problem import Problem, visible_counts

__all__ = [
    "Kernel",
    "LayerCache",
    "Plan",
    "Problem",
    "attention_plan",
    "bayesian_attention",
    "prefill",
    "register_kernel",
    "visible_counts",
]
