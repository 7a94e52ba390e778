"""Query scales that grow with length, so that attention does not fade as the number of keys grows.

Scalable Softmax is learned. The others are the fixed laws of published models, by name. Each is a module that is called
with the number of keys a query sees: pass it as the `query_scale` of `bayesian_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesattn.errors import is_number, is_whole, shown
from bayesattn.priors.base import check_heads

LARGEST_INIT = 1e20
# Counts of keys beyond this are not exact in float64.
LONGEST = 2**53


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


class FixedScaling(nn.Module):
    """r = 1 + strength · log(growth of n_i), the same for all heads, with n_i the number of keys query i can see.

    A subclass defines `growth`, which is 1 up to some length.
    """

    def __init__(self, num_heads: int, strength: float, length: int) -> None:
        super().__init__()
        self.num_heads = check_heads(num_heads)
        if not is_number(strength) or abs(strength) > LARGEST_INIT:
            raise ValueError(f"strength is {shown(strength)}; a number up to {LARGEST_INIT:g} is needed")
        if not is_whole(length, 1, LONGEST):
            raise ValueError(f"length is {shown(length)}; a whole number of tokens from 1 to 2**53 is needed")
        self.strength, self.length = float(strength), int(length)

    def growth(self, visible: Tensor) -> Tensor:
        """What the logarithm is taken of, from counts of at least 1 in floating point."""
        raise NotImplementedError

    def forward(self, visible: Tensor) -> Tensor:
        """Query scale from the visible-key counts: `[N] -> [heads, N]`, `[B, N] -> [B, heads, N]`."""
        visible = visible.clamp(min=1).to(visible.dtype if visible.is_floating_point() else torch.float32)
        r = 1 + self.strength * self.growth(visible).log()
        return r.unsqueeze(-2).expand(*r.shape[:-1], self.num_heads, -1)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, strength={self.strength:g}, length={self.length}"


class Llama4Scaling(FixedScaling):
    """r = 1 + strength · log(1 + ⌊n_i / length⌋): Llama 4, in its layers without RoPE.

    In transformers strength is `attn_scale` and length `floor_scale`. It scales queries alone; these layers have no
    prior, so `scale_prior` makes no difference there.
    """

    def __init__(self, num_heads: int, strength: float = 0.1, length: int = 8192) -> None:
        super().__init__(num_heads, strength, length)

    def growth(self, visible: Tensor) -> Tensor:
        return 1 + (visible / self.length).floor()


class MistralScaling(FixedScaling):
    """r = 1 + strength · log(1 + ⌊(n_i − 1) / length⌋): Ministral 3 (length 16,384) and Mistral 4 (8,192).

    In transformers strength is `llama_4_scaling_beta` and length `original_max_position_embeddings`. It scales queries
    alone, after RoPE: with a prior of your own pass `scale_prior=False` for the same.
    """

    def __init__(self, num_heads: int, strength: float = 0.1, length: int = 16384) -> None:
        super().__init__(num_heads, strength, length)

    def growth(self, visible: Tensor) -> Tensor:
        return 1 + ((visible - 1) / self.length).floor()


class InklingScaling(FixedScaling):
    """r = 1 + strength · log(max(1, n_i / length)): Inkling, in its layers without a window.

    In transformers strength is `log_scaling_alpha` and length `log_scaling_n_floor`. It scales the queries and the
    bias: that is `scale_prior=True`.
    """

    def __init__(self, num_heads: int, length: int, strength: float = 0.1) -> None:
        super().__init__(num_heads, strength, length)

    def growth(self, visible: Tensor) -> Tensor:
        return (visible / self.length).clamp(min=1)
