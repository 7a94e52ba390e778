"""Tensors as arrays of numpy. On some hundred numbers its operators take a third of the time of those of torch."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesattn.attention.transforms import in_torch_func

Array: TypeAlias = NDArray[Any]


def as_arrays(*tensors: Tensor) -> list[Array] | None:
    """Their own memory; None if one is not a plain tensor on the CPU, or of a dtype that numpy lacks."""
    for x in tensors:
        if type(x) is not Tensor:
            return None
    if in_torch_func() or torch.compiler.is_compiling():
        return None
    try:
        return [x.numpy() for x in tensors]
    except (TypeError, RuntimeError):
        return None


def _vecdot(a: Array, b: Array) -> Array:
    products: Array = np.einsum("...d,...d->...", a, b)
    return products


# Products of vectors in the last dimension. numpy has it from 2.0 on.
vecdot = getattr(np, "vecdot", _vecdot)
