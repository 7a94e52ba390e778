"""KERPLE's two priors: conditionally positive definite kernels of distance with two positive numbers per head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.priors.base import Prior, in_working_precision, set_per_head


class KerpleLog(Prior):
    """log p(d) = −r₁·log(1 + r₂·|d|), a power law; r₁, r₂ > 0 are learned through their logarithms.

    Starts at r₂ = 1 with r₁ spread geometrically from 2 to 1/4 over the heads.
    """

    log_r1: Tensor
    log_r2: Tensor

    def __init__(self, num_heads: int, learned: bool = True) -> None:
        super().__init__(num_heads)
        set_per_head(self, "log_r1", _geometric(num_heads), learned)
        set_per_head(self, "log_r2", torch.zeros(num_heads), learned)

    def forward(self, distance: Tensor) -> Tensor:
        distance, log_r1, log_r2 = in_working_precision(distance, self.log_r1, self.log_r2)
        return -log_r1.exp() * (log_r2.exp() * distance.abs()).log1p()

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "learned": isinstance(self.log_r1, nn.Parameter)}

    def human_parameters(self) -> dict[str, Tensor]:
        return {"r1": self.log_r1.exp(), "r2": self.log_r2.exp()}


class KerplePower(Prior):
    """log p(d) = −r₁·|d|^r₂ with r₁ > 0 learned through its logarithm and 0 < r₂ < 2 through 2·sigmoid.

    Starts at r₂ = 1 with r₁ spread geometrically from 2 to 1/4 over the heads.
    """

    log_r1: Tensor
    logit_r2: Tensor

    def __init__(self, num_heads: int, learned: bool = True) -> None:
        super().__init__(num_heads)
        set_per_head(self, "log_r1", _geometric(num_heads), learned)
        set_per_head(self, "logit_r2", torch.zeros(num_heads), learned)

    def forward(self, distance: Tensor) -> Tensor:
        distance, log_r1, logit_r2 = in_working_precision(distance, self.log_r1, self.logit_r2)
        r2 = 2 * logit_r2.sigmoid()
        # The power has no derivative in r2 at 0, but its value there is 0 for every r2: keep 0 out of the logarithm.
        away = distance.abs()
        power = (r2 * away.clamp(min=torch.finfo(away.dtype).tiny).log()).exp()
        return -log_r1.exp() * torch.where(away > 0, power, 0.0)

    def settings(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "learned": isinstance(self.log_r1, nn.Parameter)}

    def human_parameters(self) -> dict[str, Tensor]:
        return {"r1": self.log_r1.exp(), "r2": 2 * self.logit_r2.sigmoid()}


def _geometric(num_heads: int) -> Tensor:
    return torch.linspace(math.log(2), -math.log(4), num_heads)
