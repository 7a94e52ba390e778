"""The Laplace prior: belief falls exponentially with distance. With ALiBi's slopes it is ALiBi."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.priors.base import Prior, check_heads, check_per_head, in_working_precision, set_per_head


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slopes for any number of heads, `[num_heads]`.

    For a power of two h: 2^(−8/h), 2^(−16/h), … Otherwise the slopes of the next lower power of two, then every
    second slope of the next higher one; these lie between the first.
    """
    check_heads(num_heads)
    below = 2 ** math.floor(math.log2(num_heads))
    exponents = [-8 * (i + 1) / below for i in range(below)]
    exponents += [-4 * (2 * i + 1) / below for i in range(num_heads - below)]
    return torch.tensor([2.0**e for e in exponents])


class Laplace(Prior):
    """log p(d) = −slope·|d|.

    `slopes` are one number per head, ALiBi's by default; `learned=True` trains them.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, slopes: Sequence[float] | Tensor | None = None, learned: bool = False) -> None:
        super().__init__(num_heads)
        values = alibi_slopes(num_heads) if slopes is None else check_per_head("slopes", slopes, num_heads)
        set_per_head(self, "slopes", values, learned)

    def forward(self, distance: Tensor) -> Tensor:
        distance, slopes = in_working_precision(distance, self.slopes)
        return -slopes * distance.abs()

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "learned": isinstance(self.slopes, nn.Parameter)}

    def human_parameters(self) -> dict[str, Tensor]:
        return {"slope": self.slopes}
