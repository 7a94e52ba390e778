"""Perplexity of the same tokens with more and more context before them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from bayesattn.data.contexts import Tokens
from bayesattn.errors import UserError


def perplexity(
    model: Any, stream: Tokens, window: int, windows: int = 64, *, before: int = 0, first: int | None = None
) -> float:
    """Of `windows` stretches of `window` tokens spread over the stream, each read after the `before` tokens in front.

    The first stretch starts at token `first`, by default `before`; with the same `first` it is the same tokens.
    """
    first = before if first is None else first
    if first < before or len(stream) < first + window + 1 or window < 2:
        raise UserError(
            f"the text has {len(stream):,} tokens; {windows} windows of {window:,} from token {first:,} on, with "
            f"{before:,} before each, do not fit in it"
        )
    starts = torch.linspace(first, len(stream) - window - 1, windows).long().tolist()
    total = 0.0
    with torch.inference_mode():
        for start in starts:
            ids = torch.from_numpy(stream[start - before : start + window].astype("int64"))[None].to(model.device)
            logits = model(input_ids=ids, logits_to_keep=window).logits[0, :-1].float()
            total += cross_entropy(logits, ids[0, before + 1 :], reduction="sum").item()
    return math.exp(total / (windows * (window - 1)))
