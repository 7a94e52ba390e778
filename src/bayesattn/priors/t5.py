"""T5's relative position buckets: a learned number for each near distance and for each range of far ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesattn.errors import is_whole, shown
from bayesattn.priors.base import Prior

MOST_BUCKETS = 2**20


class T5Buckets(Prior):
    """log p(d) = value[bucket(d)], the values learned per head, zero (flat) at the start.

    Each bucket of the first half holds one distance. Those of the second half hold ranges that grow geometrically up to
    `max_distance`; longer distances share the last bucket. With `bidirectional`, half of the buckets are for keys ahead
    of the query. Without it, keys ahead count as distance 0.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False
    ) -> None:
        super().__init__(num_heads)
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional is {shown(bidirectional)}; True or False is needed")
        if not is_whole(num_buckets, 4 if bidirectional else 2, MOST_BUCKETS) or (bidirectional and num_buckets % 2):
            raise ValueError(
                f"num_buckets is {shown(num_buckets)}; a number from 2 to {MOST_BUCKETS:,}, or an even one from 4 if "
                "bidirectional, is needed"
            )
        per_side = num_buckets // 2 if bidirectional else num_buckets
        if not is_whole(max_distance, per_side // 2 + 1, 2**53):
            raise ValueError(
                f"max_distance is {shown(max_distance)}; with {num_buckets} buckets a whole number above "
                f"{per_side // 2} is needed"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.values = nn.Parameter(torch.zeros(num_heads, num_buckets))

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each whole-number distance."""
        distance = distance.long()
        per_side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = per_side // 2
        away = distance.abs() if self.bidirectional else distance.clamp(min=0)
        octaves = (away.clamp(min=exact).float() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (octaves * (per_side - exact)).long()).clamp(max=per_side - 1)
        bucket = torch.where(away < exact, away, far)
        return torch.where(distance < 0, bucket + per_side, bucket) if self.bidirectional else bucket

    def forward(self, distance: Tensor) -> Tensor:
        dtype = torch.promote_types(self.values.dtype, torch.float32)
        if distance.is_floating_point():
            dtype = torch.promote_types(dtype, distance.dtype)
        return self.values.to(dtype)[:, self.bucket(distance)]

    def human_parameters(self) -> dict[str, Tensor]:
        farthest = self.num_buckets // 2 - 1 if self.bidirectional else -1
        return {"nearest": self.values[:, 0], "farthest": self.values[:, farthest]}

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )
