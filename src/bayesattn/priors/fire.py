"""FIRE: a small network of the distance relative to the query's position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.priors.base import check_size
from bayesattn.priors.conditioned import ConditionedPrior

EPSILON = 1e-6
INITIAL_CURVATURE, INITIAL_THRESHOLD = 0.1, 1.0


class Fire(ConditionedPrior):
    """log p_ih(d) = g_h( log(1 + |c·d|) / (log(1 + |c·max(i, |m·L|)|) + 1e-6) ) for the query at position i.

    g is a network of one input, `hidden` rectified units and an output for each head; c and m are learned, and L is the
    training length. Queries are given their positions: `prior.given(positions)`, `[M]` or `[B, M]`, counted from the
    start of each document.

    Args:
        num_heads: outputs of g.
        training_length: L.
        hidden: units of g.
    """

    reads = "positions"
    training_length: Tensor

    def __init__(self, num_heads: int, training_length: int, hidden: int = 32) -> None:
        super().__init__(num_heads)
        self.register_buffer("training_length", torch.tensor(float(check_size("training_length", training_length))))
        self.curvature = nn.Parameter(torch.tensor(INITIAL_CURVATURE))
        self.threshold = nn.Parameter(torch.tensor(INITIAL_THRESHOLD))
        self.inner = nn.Linear(1, check_size("hidden", hidden))
        self.outer = nn.Linear(hidden, num_heads)

    def forward(self, positions: Tensor) -> Tensor:
        """`[M]` or `[B, M] -> [1 or B, 1, M, 1]`: what the logarithm of the distance is multiplied by."""
        if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_complex():
            is_tensor = isinstance(positions, Tensor)
            given = f"{positions.dtype} of shape {list(positions.shape)}" if is_tensor else type(positions).__name__
            raise ValueError(
                f"Fire got {given}; positions of queries, numbers [queries] or [batch, queries], are needed"
            )
        longest = torch.maximum(positions.to(self.curvature.dtype), (self.threshold * self.training_length).abs())
        normaliser = torch.log1p((self.curvature * longest).abs()) + EPSILON
        return normaliser.reciprocal().expand(*[1] * (2 - positions.dim()), *positions.shape)[:, None, :, None]

    def shared(self) -> tuple[Tensor, ...]:
        common = (self.curvature, self.inner.weight.flatten(), self.inner.bias)
        return (*(x.unsqueeze(0) for x in common), self.outer.weight, self.outer.bias)

    def settings(self) -> dict[str, Any]:
        hidden = self.outer.in_features
        return {"num_heads": self.num_heads, "training_length": int(self.training_length), "hidden": hidden}

    @staticmethod
    def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        curvature, inner, inner_bias, outer, outer_bias = shared
        relative = (curvature * distances).abs_().log1p_() * parameters  # [B, 1, m, n]
        units = torch.addcmul(inner_bias.mT, relative.flatten(2), inner.mT).relu_()  # [B, hidden, m · n]
        return (outer @ units).add_(outer_bias.unsqueeze(-1)).unflatten(-1, relative.shape[2:])

    @staticmethod
    def simplify(parameters: Tensor, shared: tuple[Tensor, ...], nearest: int, farthest: int) -> tuple[Tensor, ...]:
        """The units that are at work for some of these distances but not for all; the others are one linear function.

        Far from the query few units remain: the logarithm of the distance hardly changes there.
        """
        curvature, inner, inner_bias, outer, outer_bias = shared
        ends = torch.tensor([max(nearest, -farthest, 0), max(-nearest, farthest)]).to(parameters)
        least, most = (curvature.detach() * ends).abs_().log1p_() * torch.stack(parameters.detach().aminmax())
        at_ends = inner_bias.detach() + inner.detach() * torch.stack([least, most])[:, None]  # [2, hidden]
        works = (at_ends > 0).all(0)
        changes = (at_ends > 0).any(0) & ~works
        slope, intercept = (outer @ (x * works).mT for x in (inner, inner_bias))  # [heads, 1]
        return (
            curvature,
            torch.cat([torch.ones_like(inner[:, :1]), inner[:, changes]], 1),
            torch.cat([torch.zeros_like(inner_bias[:, :1]), inner_bias[:, changes]], 1),
            torch.cat([slope, outer[:, changes]], 1),
            outer_bias + intercept.squeeze(1),
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, training_length={int(self.training_length)}"
