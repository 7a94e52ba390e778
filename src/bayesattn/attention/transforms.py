"""Which transforms of torch are at work: torch has no public names for that, so they are asked for in one place."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether tangents may be about, which the wrappers of `torch.func` hide from the tensors."""
    return forward_ad._current_level >= 0


def in_torch_func() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_vmap() -> bool:
    """Whether one of them is `torch.vmap`, in which values cannot be looked at."""
    if not in_torch_func():  # the usual case, and the cheapest question
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Vmap for each in transforms)
