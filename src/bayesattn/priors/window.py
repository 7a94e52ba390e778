"""The window prior: sliding-window attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesattn.errors import is_whole, shown
from bayesattn.priors.base import Prior, in_working_precision

# Distances up to this are exact in float32.
WIDEST = 2**24


class Window(Prior):
    """log p(d) = 0 for |d| < width, −inf beyond: a causal query sees itself and the `width` − 1 keys before it.

    `width` is one number for all heads or one per head.
    """

    width: Tensor

    def __init__(self, num_heads: int, width: int | Sequence[int]) -> None:
        super().__init__(num_heads)
        widths = list(width) if isinstance(width, Sequence) and not isinstance(width, str) else [width] * num_heads
        if len(widths) != num_heads or not all(is_whole(w, 1, WIDEST) for w in widths):
            raise ValueError(
                f"width is {shown(width)}; a whole number of keys from 1 to {WIDEST:,}, or one for each of {num_heads} "
                "heads, is needed"
            )
        self.register_buffer("width", torch.tensor(widths))

    def forward(self, distance: Tensor) -> Tensor:
        distance, width = in_working_precision(distance, self.width)
        inside = distance.abs() < width
        return torch.zeros_like(inside, dtype=distance.dtype).masked_fill(~inside, -torch.inf)

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "width": self.width.tolist()}

    def human_parameters(self) -> dict[str, Tensor]:
        return {"width": self.width}
