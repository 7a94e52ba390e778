"""Scalable Softmax: a temperature that keeps attention from fading as the number of keys grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScalableSoftmax(nn.Module):
    """r = s_h · log n_i, with s_h learned per head and n_i the number of keys query i can see.

    With one visible key r is 0, and the posterior is that key whatever its logit. `ScalableSoftmax` is passed as the
    `query_scale` of `bayesian_attention`, which counts the keys itself, or called with counts of one's own. Heads for
    which `lengthwise` is false have the constant temperature r = s_h instead.
    """

    lengthwise: Tensor

    def __init__(self, num_heads: int, init: float = 1.0, lengthwise: Sequence[bool] | None = None) -> None:
        super().__init__()
        if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"num_heads is {num_heads!r}; a whole number of heads, at least 1, is needed")
        chosen = [True] * num_heads if lengthwise is None else list(lengthwise)
        if len(chosen) != num_heads:
            raise ValueError(f"lengthwise has {len(chosen)} entries; one for each of {num_heads} heads is needed")
        self.num_heads = num_heads
        self.s = nn.Parameter(torch.full((num_heads,), float(init)))
        self.register_buffer("lengthwise", torch.tensor(chosen))

    def forward(self, visible: Tensor) -> Tensor:
        """Query scale from the visible-key counts: `[N] -> [heads, N]`, `[B, N] -> [B, heads, N]`."""
        wide = visible.dtype if visible.is_floating_point() else torch.float32
        s = self.s.to(torch.promote_types(self.s.dtype, wide))
        growth = visible.clamp(min=1).to(s.dtype).log().unsqueeze(-2)
        return s[:, None] * torch.where(self.lengthwise[:, None], growth, 1.0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
