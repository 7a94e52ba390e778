"""Log-length scaling (Scalable Softmax): attention does not fade as the number of keys grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesattn.errors import is_number, shown
from bayesattn.priors.base import check_heads

LARGEST_INIT = 1e20


class ScalableSoftmax(nn.Module):
    """r = s_h · log n_i, with s_h learned per head and n_i the number of keys query i can see.

    Pass it as the `query_scale` of `bayesian_attention`, which counts the visible keys, or call it with counts of your
    own. With one visible key r is 0, and that key has all the posterior mass. Heads for which `grows_with_length` is
    false have the constant scale r = s_h instead.
    """

    grows_with_length: Tensor

    def __init__(self, num_heads: int, init: float = 1.0, grows_with_length: Sequence[bool] | None = None) -> None:
        super().__init__()
        self.num_heads = check_heads(num_heads)
        if not is_number(init) or abs(init) > LARGEST_INIT:
            raise ValueError(f"init is {shown(init)}; a number up to {LARGEST_INIT:g} is needed")
        given = [True] * num_heads if grows_with_length is None else grows_with_length
        chosen = list(given) if isinstance(given, Sequence) else []
        if len(chosen) != num_heads or not all(isinstance(each, bool) for each in chosen):
            raise ValueError(
                f"grows_with_length is {shown(grows_with_length)}; a sequence of {num_heads}, True or False for each "
                "head, is needed"
            )
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
