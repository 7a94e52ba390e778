"""The generalized Gaussian whose shape each query chooses: content-aware BAM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesattn.priors.base import check_size
from bayesattn.priors.conditioned import ConditionedPrior, check_states

EPSILON = 1e-5
# Logs of α and of the centre, and the power β, stay within these bounds. Beyond, float32 would overflow.
LARGEST_LOG_ALPHA, LARGEST_BETA, LARGEST_LOG_CENTRE = 20.0, 8.0, 12.0
# A density of exp(−exp(60)) is zero in any precision.
LARGEST_EXPONENT = 60.0
# Covers the rounding of a bound.
SLACK = 1e-3


class ConditionedGaussian(ConditionedPrior):
    """log p_ih(d) = −α·(|d + μ| + 1e-5)^β with α = e^a, β = b, μ = e^m − e^−m, made from the state x_i:

        (a, b, m)_h = W₂ · SiLU(W₁ x_i + c₁) + c₂

    The parameters are bounded: |a| ≤ 20, |b| ≤ 8, |m| ≤ 12.

    Args:
        num_heads: heads, each with its own a, b, m.
        width: size of a state.
        hidden: units of W₁.
    """

    def __init__(self, num_heads: int, width: int, hidden: int = 32) -> None:
        super().__init__(num_heads)
        self.width, self.hidden = check_size("width", width), check_size("hidden", hidden)
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, 3 * self.num_heads))

    def forward(self, states: Tensor) -> Tensor:
        """`[B, M, width] -> [B, H, M, 3]`: a, b and μ of every query."""
        raw = self.network(check_states("ConditionedGaussian", states, self.width))
        raw = raw.unflatten(-1, (self.num_heads, 3)).transpose(1, 2)
        a, b, m = raw.to(torch.promote_types(raw.dtype, torch.float32)).unbind(-1)
        return torch.stack(
            [
                a.clamp(-LARGEST_LOG_ALPHA, LARGEST_LOG_ALPHA),
                b.clamp(-LARGEST_BETA, LARGEST_BETA),
                2 * m.clamp(-LARGEST_LOG_CENTRE, LARGEST_LOG_CENTRE).sinh(),
            ],
            -1,
        )

    @staticmethod
    def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        a, b, mu = parameters.unsqueeze(-2).unbind(-1)  # [B, h, m, 1]
        # In place, and to the base of 2: a tile's rows are few operators over much memory, and these are the fastest.
        exponent = (distances + mu).abs_().add_(EPSILON).log2_().mul_(b).add_(a / math.log(2))
        return -exponent.clamp_(max=LARGEST_EXPONENT / math.log(2)).exp2_()

    @staticmethod
    def highest(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        """At the end that is nearer to the centre for β > 0, at the farther one otherwise."""
        a, b, mu = parameters.unsqueeze(-2).unbind(-1)
        first, last = distances.amin(-1) + mu, distances.amax(-1) + mu
        nearest = torch.maximum(first, -last).clamp(min=0.0)
        farthest = torch.maximum(first.abs(), last.abs())
        from_centre = torch.where(b > 0, nearest * (1 - SLACK), farthest * (1 + SLACK)) + EPSILON
        return -(a + b * from_centre.log() - SLACK).clamp(max=LARGEST_EXPONENT).exp()

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, width={self.width}"
