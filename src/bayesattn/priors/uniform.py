"""The uniform prior: every distance is as likely as any other."""

from __future__ import annotations

from torch import Tensor

from bayesattn.priors.base import Prior, in_working_precision


class Uniform(Prior):
    """log p(d) = 0: no positional encoding at all (NoPE)."""

    def forward(self, distance: Tensor) -> Tensor:
        (distance,) = in_working_precision(distance)
        return distance.new_zeros(self.num_heads, *distance.shape)
