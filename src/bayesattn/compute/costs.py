"""Rows of costs, as result files have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bayesattn.schemas import Amount, Row, Share, Tokens, number


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
