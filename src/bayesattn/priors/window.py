"""The window prior: sliding-window attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesattn.priors.base import Prior, in_working_precision


class Window(Prior):
    """log p(d) = 0 for |d| < width, −inf beyond: a causal query sees itself and the `width` − 1 keys before it.

    `width` is one number for all heads or one per head.
    """

    width: Tensor

    def __init__(self, num_heads: int, width: int | Sequence[int]) -> None:
        super().__init__(num_heads)
        widths = [width] * num_heads if isinstance(width, int) else list(width)
        if len(widths) != num_heads or not all(isinstance(w, int) and w >= 1 for w in widths):
            raise ValueError(f"width is {width!r}; give one whole number of keys, at least 1, or {num_heads} of them")
        self.register_buffer("width", torch.tensor(widths))

    def forward(self, distance: Tensor) -> Tensor:
        distance, width = in_working_precision(distance, self.width)
        inside = distance.abs() < width
        return torch.zeros_like(inside, dtype=distance.dtype).masked_fill(~inside, -torch.inf)

    def human_parameters(self) -> dict[str, Tensor]:
        return {"width": self.width}
