"""How a posterior is computed."""

from bayesattn.attention.api import bayesian_attention
from bayesattn.attention.kernels import Kernel, register_kernel
from bayesattn.attention.problem import Problem, visible_counts

__all__ = ["Kernel", "Problem", "bayesian_attention", "register_kernel", "visible_counts"]
