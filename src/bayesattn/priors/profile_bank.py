"""Profiles over distance that each query mixes: the relative logits of Inkling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.priors.base import check_size
from bayesattn.priors.conditioned import ConditionedPrior, check_states

INITIAL_SPREAD = 0.02


class ProfileBank(ConditionedPrior):
    """log p_ih(d) = ρ_ih · bank[:, d] for 0 ≤ d < extent, and 0 elsewhere, with ρ_ih = (W x_i)_h.

    The heads share one bank of `rank` profiles. Far keys all have the log-prior 0; multiply by a `Window` to hide them.

    Args:
        num_heads: heads, each with its own mixture ρ.
        width: size of a state.
        rank: number of profiles.
        extent: distances that a profile covers.
    """

    elementwise = False

    def __init__(self, num_heads: int, width: int, rank: int = 16, extent: int = 1024) -> None:
        super().__init__(num_heads)
        self.width = check_size("width", width)
        self.mixture = nn.Linear(width, num_heads * check_size("rank", rank), bias=False)
        self.bank = nn.Parameter(torch.randn(rank, check_size("extent", extent)) * INITIAL_SPREAD)

    def forward(self, states: Tensor) -> Tensor:
        """`[B, M, width] -> [B, H, M, rank]`."""
        mixed: Tensor = self.mixture(check_states("ProfileBank", states, self.width))
        return mixed.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def shared(self) -> tuple[Tensor, ...]:
        return (self.bank.unsqueeze(0),)

    def settings(self) -> dict[str, Any]:
        rank, extent = self.bank.shape
        return {"num_heads": self.num_heads, "width": self.width, "rank": rank, "extent": extent}

    @staticmethod
    def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        bank = shared[0][0]
        extent = bank.shape[1]
        outside = (distances < 0) | (distances >= extent)
        profiles = bank[:, distances.clamp(0, extent - 1).long()].masked_fill(outside, 0.0)
        return parameters @ profiles

    @staticmethod
    def extent(shared: tuple[Tensor, ...]) -> int:
        return shared[0].shape[-1]

    @staticmethod
    def highest(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        """The largest value, since values are few: beyond the extent all are 0."""
        extent, sets = shared[0].shape[-1], len(distances)
        inside = ((distances < extent) & (distances >= 0)).any(-1)
        bound = parameters.new_zeros(*parameters.shape[:3], sets)
        values = ProfileBank.rows(parameters, shared, distances[inside].flatten())
        bound[..., inside] = values.unflatten(-1, (-1, distances.shape[-1])).amax(-1)
        return bound

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, width={self.width}, extent={self.bank.shape[1]}"
