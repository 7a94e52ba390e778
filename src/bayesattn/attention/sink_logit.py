"""A sink without a key: a learned logit for each head that takes attention away from the keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesattn.errors import is_number, shown
from bayesattn.priors.base import check_heads

LARGEST_INIT = 1e20


class SinkLogit(nn.Module):
    """Attention as if every query saw one more key, of value 0 and logit s_h, which is learned per head.

        output_i · sigmoid(lse_i − s_h) = Σ_j exp(logit_ij) · v_j / (exp(s_h) + Σ_j exp(logit_ij))

    A head may so attend to nothing. gpt-oss calls these its sinks. Apply it to what `attention_with_lse` returns:

        out = sink_logit(*attention_with_lse(q, k, v, prior))

    No query scale multiplies s_h.

    Args:
        num_heads: query heads.
        init: every s_h at the start.
    """

    def __init__(self, num_heads: int, init: float = 0.0) -> None:
        super().__init__()
        self.num_heads = check_heads(num_heads)
        if not is_number(init) or abs(init) > LARGEST_INIT:
            raise ValueError(f"init is {shown(init)}; a number up to {LARGEST_INIT:g} is needed")
        self.s = nn.Parameter(torch.full((num_heads,), float(init)))

    def forward(self, out: Tensor, lse: Tensor) -> Tensor:
        """The output `[B, H, M, Dv]` with the sink, in its dtype, from the log-sum-exp of its logits, `[B, H, M]`."""
        if not isinstance(out, Tensor) or not isinstance(lse, Tensor):
            kinds = f"{type(out).__name__} and {type(lse).__name__}"
            raise TypeError(f"SinkLogit got {kinds}; the two tensors of attention_with_lse are needed")
        if out.dim() != 4 or lse.shape != out.shape[:3] or out.shape[1] != self.num_heads:
            raise ValueError(
                f"SinkLogit of {self.num_heads} heads got an output of shape {list(out.shape)} and a log-sum-exp of "
                f"{list(lse.shape)}; [batch, heads, queries, size] and [batch, heads, queries] are needed"
            )
        share = (lse - self.s.to(lse.dtype)[:, None]).sigmoid()
        return (out * share.unsqueeze(-1)).to(out.dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
