"""One kernel a file, and the operator that makes each of them differentiable."""

from bayesattn.attention.kernels.registry import Kernel, register_kernel, solve

__all__ = ["Kernel", "register_kernel", "solve"]
