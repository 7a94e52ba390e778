"""The sinks of a cache: keys and values of the first tokens of each sequence, which are never evicted.

To the stores these positions are padding. Attention to them is computed apart and merged.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, C sinks, D head size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesattn.attention.inputs import check_table
from bayesattn.attention.sink_keys import SinkProblem, attend_to_finite_sinks
from bayesattn.priors.sinks import Sinks


@dataclass(frozen=True)
class HeldSinks:
    """Sink n of a sequence is its position padding + n. It holds zeros until that position comes."""

    log_prior: Tensor  # [H, C]
    hides: bool  # whether some of it is −inf
    k: Tensor  # [B, G, C, D]
    v: Tensor  # [B, G, C, E]

    @classmethod
    def none_yet(cls, sinks: Sinks, k: Tensor, v: Tensor) -> HeldSinks:
        """For keys and values such as these."""
        log_prior = check_table(
            "Sinks", sinks.log_prior.detach().clone().to(torch.promote_types(k.dtype, torch.float32))
        )
        room = (x.new_zeros(*x.shape[:2], sinks.count, x.shape[3]) for x in (k, v))
        return cls(log_prior, bool(log_prior.isneginf().any()), *room)

    @property
    def count(self) -> int:
        return self.k.shape[2]

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def append(self, k: Tensor, v: Tensor, first: int, padding: Tensor | None, most_padding: int) -> HeldSinks:
        """With the sinks among the next tokens, which stand at positions from `first` on. Nothing is overwritten."""
        if first >= most_padding + self.count or not k.shape[2]:
            return self
        slot = torch.arange(self.count, device=k.device)
        start = slot.new_zeros(len(k)) if padding is None else padding.to(k.device)
        index = start[:, None] + slot - first  # [B, C], of the new tokens
        is_new = ((index >= 0) & (index < k.shape[2]))[:, None, :, None]
        index = index.clamp(0, k.shape[2] - 1)[:, None, :, None]
        return replace(
            self,
            k=torch.where(is_new, k.gather(2, index.expand(-1, k.shape[1], -1, k.shape[3])), self.k),
            v=torch.where(is_new, v.gather(2, index.expand(-1, v.shape[1], -1, v.shape[3])), self.v),
        )

    def reorder(self, index: Tensor) -> HeldSinks:
        """Let sequence b be what sequence `index[b]` was."""
        index = index.to(self.k.device)
        return replace(self, k=self.k.index_select(0, index), v=self.v.index_select(0, index))

    def attend(
        self,
        q: Tensor,
        query_scale: Tensor | None,
        *,
        length: int,
        padding: Tensor | None,
        most_padding: int,
        scale_prior: bool,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention to the sinks, and its log-sum-exp, of the queries `[B, H, M, D]` of the last of `length` positions.

        Their scales are `[1 or B, H, M, 1]`.
        """
        rows = q.shape[2]
        ranges = None
        if length - rows - most_padding >= self.count - 1:  # all see all of them
            if rows == 1 and not self.hides and q.dtype == self.log_prior.dtype:
                return self._attend_to_all(q, query_scale, scale_prior, softmax_scale)
        else:
            position = torch.arange(length - rows + 1, length + 1, device=q.device)
            start = position.new_zeros(len(q)) if padding is None else padding.to(q.device)
            stop = (position - start[:, None]).clamp(0, self.count)
            ranges = torch.stack([torch.zeros_like(stop), stop], -1)
        problem = SinkProblem(
            q, self.k, self.v, self.log_prior, None if query_scale is None else query_scale.squeeze(-1), ranges,
            softmax_scale=softmax_scale, scale_prior=scale_prior, causal=False, offset=0,
        )  # fmt: skip
        return attend_to_finite_sinks(problem)

    def _attend_to_all(
        self, q: Tensor, query_scale: Tensor | None, scale_prior: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """The same for one query `[B, H, 1, D]` that sees every sink, in fewer operators."""
        kv_heads = self.k.shape[1]
        q, bias = (x.squeeze(-2).unflatten(-2, (kv_heads, -1)) for x in (q, self.log_prior.unsqueeze(-2)))
        if query_scale is not None:
            r = query_scale.squeeze(2).unflatten(1, (kv_heads, -1))  # [1 or B, G, R, 1]
            q, bias = q * r, bias * r if scale_prior else bias
        logits = (q @ self.k.mT).mul_(softmax_scale).add_(bias)  # [B, G, R, C]
        out = logits.softmax(-1) @ self.v
        return out.flatten(1, 2).unsqueeze(2), logits.logsumexp(-1).flatten(1).unsqueeze(2)
