"""Rows of costs, as result files have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from bayesattn.schemas import Amount, Positive, Row, Share, Tokens, number


@dataclass(frozen=True)
class StageCost(Row):
    """One stage of a schedule, counted in three ways.

    `flops_full` counts attention over all pairs of tokens, `flops_causal` only the keys that a causal query sees.
    `share_blog` is the popular estimate tokens · length², with K = 1000.
    """

    tokens: Annotated[float, number(1)]
    length: Tokens
    flops_full: Amount
    flops_causal: Amount
    share_full: Share
    share_causal: Share
    share_blog: Share
    attention_share_full: Share
    attention_share_causal: Share


@dataclass(frozen=True)
class Inference(Row):
    """Cost of prefill and decoding: with all keys in the cache, or only those that local heads can use."""

    length: Tokens
    prefill_full: Amount
    prefill_kept: Amount
    kv_full: Amount
    kv_kept: Amount
    decode_bytes_full: Amount
    decode_bytes_kept: Amount


@dataclass(frozen=True)
class BlogShare(Row):
    """The share of long contexts in a schedule's training, by the popular estimate and counted exactly (causal)."""

    derived: ClassVar[tuple[str, ...]] = ("factor_blog", "factor")

    schedule: str
    share_blog: Share
    share: Share

    @property
    def factor_blog(self) -> Amount | None:
        """How many times the cost without long contexts the whole is."""
        return _factor(self.share_blog)

    @property
    def factor(self) -> Amount | None:
        return _factor(self.share)


@dataclass(frozen=True)
class Gradual(Row):
    """Contexts that get shorter from batch to batch.

    Args:
        tokens: of all batches.
        longest, shortest: contexts of the first batch, and of the one that would follow the last.
        same_cost: by the popular estimate, the context at which 100B tokens cost as much.
        mean: the context at which all tokens cost as much exactly: their mean, as attention grows with tokens · length.
        share_blog, share: in a training with 15T tokens at 8K before, by the popular estimate and exactly (causal).
    """

    tokens: Positive
    longest: Tokens
    shortest: Tokens
    same_cost: Positive
    mean: Positive
    share_blog: Share
    share: Share


def _factor(share: float) -> float | None:
    return None if share >= 1 else 1 / (1 - share)
