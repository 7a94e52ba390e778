"""`near_heads`: which heads of a model need no far part when it is extended, by the prices of windows on short text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bayesattn.adapt.extension import SINKS
from bayesattn.data.contexts import encode_stream
from bayesattn.data.text import BUNDLED, documents
from bayesattn.errors import UserError, is_whole, shown
from bayesattn.fit.allotment import Head
from bayesattn.fit.contexts import PASSAGE, make_contexts
from bayesattn.fit.fitting import RECALL_SHARE, as_tokens, check_share, check_tokens
from bayesattn.fit.price_files import Prices, load_prices
from bayesattn.fit.prices import Step, fingerprint_of, measure_prices, other_model

# Texts are measured at the training length, or at this if that is longer; and so many tokens in all.
LONGEST = 4096
FEWEST_CONTEXTS = 2
# A quarter of the shortest text is one passage.
SHORTEST, LONGEST_TEXT = 4 * PASSAGE, 2**24


def near_heads(
    model: Any,
    prices: Prices | Path | str | None = None,
    keep: float = 0.5,
    *,
    window: int = 2048,
    texts: str | Sequence[Any] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    step: Step | None = None,
) -> list[Head]:
    """The key/value heads for `near` of `extend`: all but the share `keep` that a window changes most.

    What a window costs a head is measured as for `fit_priors`, on texts no longer than the training length, in which
    some passages recur. So the choice knows nothing of long texts. In these, an extended model with a cache of
    `make_cache()` keeps the share `keep` of its keys, and besides the last `window` and the first few of each head.

    Args:
        model: of transformers, before it is extended.
        prices: of `fit_priors` or `bayesattn fit`, or a file with them. Their widest window up to `window` counts.
        keep: the share of the heads that see far keys. Those of layers without rotary positions always do, and more
            than the share if they are many.
        window: that of `extend`.
        texts: without prices, one text or several to measure on, as for `fit_priors`. The window that is measured is
            `window`, or a quarter of `length` if that is less.
        tokenizer: for texts that are strings.
        length: tokens to measure on; the training length by default, or 4,096 if that is less.
        step: called with what is measured, what is done and of how much.

    Returns:
        Pairs of a layer's number and one of its heads. Layers with a sliding window of their own have none.

    Raises:
        UserError: one sentence, for a share without any head or with all of them, prices of another model or of wider
            windows alone, and texts that are too short.
    """
    check_share(keep)
    if not is_whole(window, 1, LONGEST_TEXT):
        raise UserError(f"window is {shown(window)}; a whole number of tokens from 1 is needed")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"the model is a {type(model).__name__}; a model of transformers is needed")
    if (prices is None) == (texts is None):
        raise UserError("near heads are chosen by prices of bayesattn fit, or by texts to measure them on; give one")
    if prices is None:
        prices = _measure(model, as_tokens(texts, tokenizer), window, length, step)  # type: ignore[arg-type]
    elif not isinstance(prices, Prices):
        if not isinstance(prices, (str, Path)):
            raise UserError(f"prices is {shown(prices)}; prices of fit_priors, or a file with them, are needed")
        prices = load_prices(prices)
    if prices.fingerprint != fingerprint_of(model):
        raise UserError(other_model(model))
    if not prices.finished:
        raise UserError("the measurement of the prices was stopped; the same command on the same text finishes it")
    measured = [width for width in prices.widths if width <= window]
    if not measured:
        raise UserError(f"window is {window:,}, and prices are of windows from {prices.widths[0]:,} tokens on")
    place = prices.widths.index(max(measured))
    cost = {head: each[place] for head, each in prices.of_heads(RECALL_SHARE).items()}
    far = int(keep * len(cost) + 1e-9)
    if not far:
        raise UserError(
            f"keep is {keep:.2%} of {len(cost)} key/value heads, which is none; at least {1 / len(cost):.2%} is needed"
        )
    return sorted(sorted(cost, key=lambda head: (cost[head], head))[: len(cost) - far])


def choose_near(
    model: Any, prices: Path | None, keep: float, *, window: int, tokenizer: Any, step: Step | None = None
) -> list[Head]:
    """`near_heads` by a file of prices, or by the bundled text without the part that evaluations read."""
    if prices is not None:
        return near_heads(model, prices, keep, window=window)
    stream = encode_stream(documents(BUNDLED, "train"), tokenizer)
    return near_heads(model, None, keep, window=window, texts=[stream], step=step)


def _measure(model: Any, texts: list[Any], window: int, length: int | None, step: Step | None) -> Prices:
    """The prices of one window, at most a quarter of a text, so that most of the text is farther away."""
    if length is None:
        trained = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
        length = min(trained, LONGEST)
    if not is_whole(length, SHORTEST, LONGEST_TEXT):
        raise UserError(f"length is {shown(length)}; a whole number of tokens from {SHORTEST:,} is needed")
    enough = max(FEWEST_CONTEXTS, LONGEST // length)
    contexts = make_contexts(texts, length, min(enough, max(len(texts), sum(len(text) // length for text in texts))))
    check_tokens(model, contexts)
    widths = [min(window, length // 4)]
    return measure_prices(model, contexts, widths, SINKS, step=step, clock=time.perf_counter)
