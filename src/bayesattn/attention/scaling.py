"""Log-length scaling (Scalable Softmax): attention does not fade as the number of keys grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScalableSoftmax(nn.Module):
    """r = s_h · log n_i, with s_h learned per head and n_i the number of keys query i can see.

    Pass it as the `query_scale` of `bayesian_attention`, which counts the visible keys, or call it with counts of your
    own. With one visible key r is 0, and that key has all the posterior mass. Heads for which `grows_with_length` is
    false have the constant scale r = s_h instead.
    """

    grows_with_length: Tensor

    def __init__(self, num_heads: int, init: float = 1.0, grows_with_length: Sequence[bool] | None = None) -> None:
        super().__init__()
        if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"num_heads is {num_heads!r}; a whole number of heads, at least 1, is needed")
        chosen = [True] * num_heads if grows_with_length is None else list(grows_with_length)
        if len(chosen) != num_heads:
            raise ValueError(
                f"grows_with_length has {len(chosen)} entries; one for each of {num_heads} heads is needed"
            )
        self.num_heads = num_heads
        self.s = nn.Parameter(torch.full((num_heads,), float(init)))
        self.register_buffer("grows_with_length", torch.tensor(chosen))

    def forward(self, visible: Tensor) -> Tensor:
        """Query scale from the visible-key counts: `[N] -> [heads, N]`, `[B, N] -> [B, heads, N]`."""
        wide = visible.dtype if visible.is_floating_point() else torch.float32
        s = self.s.to(torch.promote_types(self.s.dtype, wide))
        growth = visible.clamp(min=1).to(s.dtype).log().unsqueeze(-2)
        return s[:, None] * torch.where(self.grows_with_length[:, None], growth, 1.0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
