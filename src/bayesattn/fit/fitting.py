"""`fit_priors`: a window for every head of a pretrained model, so that its cache takes the memory you allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesattn.adapt.add_prior import add_prior
from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.parts import num_heads
from bayesattn.errors import UserError, is_number, is_whole, shown
from bayesattn.fit.allotment import ALL, Head, allot, check_affordable, positions_held
from bayesattn.fit.contexts import Context, check_length, make_contexts
from bayesattn.fit.ladder import make_ladder
from bayesattn.fit.price_files import Prices, load_prices
from bayesattn.fit.prices import Step, fingerprint_of, measure_prices, other_model
from bayesattn.fit.reading import check_model
from bayesattn.priors import Sinks, Window

# First tokens that every head keeps.
SINKS = 4
# How much queries that look something up count in a price, and those of plain text the rest.
RECALL_SHARE = 0.3
MOST_CONTEXTS = 64


@dataclass(frozen=True)
class Fit:
    """The windows that a model got.

    Args:
        widths: of each key/value head, by layer and head; None for a head that keeps all keys.
        keep: the share of a full cache that was allowed.
        share: the share that the cache holds at `prices.length` tokens.
        expected: the sum of the prices of these windows: about the divergence from the model as it was, in nats a
            token.
        prices: what was measured. Give them to `fit_priors` again for another share.
    """

    widths: dict[Head, int | None]
    keep: float
    share: float
    expected: float
    prices: Prices

    def __str__(self) -> str:
        whole = sum(width is None for width in self.widths.values())
        bounded = sorted(width for width in self.widths.values() if width is not None)
        spans = f"; the others to the last {bounded[0]:,} … {bounded[-1]:,} tokens" if bounded else ""
        return (
            f"{self.share:.1%} of the cache at {self.prices.length:,} tokens: {whole} of {len(self.widths)} key heads "
            f"keep everything{spans} and the first {self.prices.sinks}"
        )


def fit_priors(
    model: Any,
    texts: str | Sequence[Any] | None,
    keep: float = 0.3,
    *,
    length: int = 8192,
    tokenizer: Any = None,
    contexts: int = 2,
    sinks: int = SINKS,
    recall_share: float = RECALL_SHARE,
    prices: Prices | Path | str | None = None,
    step: Step | None = None,
    save: Callable[[Prices], object] | None = None,
) -> Fit:
    """Give each key/value head of a pretrained model a window and sinks, so that its cache keeps a share of its bytes.

    Weights stay as they are. For each head the change of its layer's output is measured under windows of several
    widths, with the inputs that the model has without windows (`Prices`). Then the windows are chosen that cost least
    for the memory allowed. They become `Sinks(Window(...))` of `add_prior`: the model changes in place, generates with
    `model.make_cache(full_prompt=True)` or `make_cache()`, and can be saved. Layers with a sliding window of their own
    stay as they are and do not count.

    Args:
        model: a causal language model whose attention goes through transformers' AttentionInterface.
        texts: one text, or several. Each is a sequence of tokens, or a string if there is a tokenizer. Passages of
            random tokens that recur are put in, so that heads which look something up show. None takes `prices` as
            they are.
        keep: the share of bytes that the cache may take, between 0 and 1.
        length: tokens at which it does, and of each context that is measured.
        tokenizer: for texts that are strings.
        contexts: how many stretches of text are measured; they do not overlap.
        sinks: first tokens that every head keeps.
        recall_share: how much queries that look something up count in a price, from 0 to 1.
        prices: of an earlier measurement, or a file for them. What they have is not measured again: a file of a
            measurement that was stopped is continued.
        step: called with what is measured, what is done and of how much.
        save: called with the prices so far after every layer, besides the file.

    Returns:
        What was chosen, and the prices.

    Raises:
        UserError: one sentence, for a share outside of (0, 1) or too small for the narrowest windows, a text shorter
            than the length, a model that has priors or no supported attention, and prices of another model.
    """
    check_share(keep)
    check_length(length)
    check_model(model)
    if not is_whole(sinks, 1, length // 8):
        raise UserError(f"sinks is {shown(sinks)}; a whole number from 1 to {length // 8:,} is needed")
    if not is_whole(contexts, 1, MOST_CONTEXTS):
        raise UserError(f"contexts is {shown(contexts)}; a whole number from 1 to {MOST_CONTEXTS} is needed")
    if not is_number(recall_share) or not 0 <= recall_share <= 1:
        raise UserError(f"recall_share is {shown(recall_share)}; a number from 0 to 1 is needed")
    if prices is not None and not isinstance(prices, (Prices, str, Path)):
        raise UserError(f"prices is {shown(prices)}; prices of fit_priors, or a file for them, are needed")
    path = Path(prices) if isinstance(prices, (str, Path)) else None
    before = prices if isinstance(prices, Prices) else load_prices(path) if path and path.exists() else None
    if texts is None and before is None:
        raise UserError("there are neither texts nor prices of an earlier measurement; one of them is needed")
    if texts is not None:
        widths = make_ladder(length)
        check_affordable(keep, widths[0], length, sinks)
        made = make_contexts(as_tokens(texts, tokenizer), length, contexts)
        check_tokens(model, made)
        before = measure_prices(
            model, made, widths, sinks, before=before, keep=_saver(path, save), step=step,
            clock=time.perf_counter,
        )  # fmt: skip
    assert before is not None
    return apply(model, before, keep, recall_share)


def apply(model: Any, prices: Prices, keep: float, recall_share: float = RECALL_SHARE) -> Fit:
    """Choose windows by their prices, and add them to the model, which changes in place."""
    check_model(model)
    if prices.fingerprint != fingerprint_of(model):
        raise UserError(other_model(model))
    fit = choose(prices, keep, recall_share)
    layers = attention_layers(model)
    priors = {}
    for layer in sorted({layer for layer, _ in fit.widths}):
        widths = [width for (number, _), width in sorted(fit.widths.items()) if number == layer]
        heads = num_heads(layers[layer])
        if any(width is not None for width in widths):
            group = heads // len(widths)
            each = [ALL if width is None else width for width in widths for _ in range(group)]
            priors[layer] = Sinks(Window(heads, each), prices.sinks)
    if priors:
        add_prior(model, list(priors.values()), layers=list(priors))
    return fit


def choose(prices: Prices, keep: float, recall_share: float = RECALL_SHARE) -> Fit:
    """The windows that cost least for a share of the cache's bytes."""
    check_share(keep)
    if not prices.finished:
        raise UserError("the measurement of the prices was stopped; the same command on the same text finishes it")
    by_head = prices.of_heads(recall_share)
    chosen = allot(by_head, prices.widths, prices.length, prices.sinks, keep)
    layers: dict[int, list[int]] = {}
    for (layer, _), width in sorted(chosen.items()):
        layers.setdefault(layer, []).append(width)
    held = sum(positions_held(tuple(sorted(widths)), prices.length, prices.sinks) for widths in layers.values())
    expected = sum(by_head[head][prices.widths.index(width)] for head, width in chosen.items() if width != ALL)
    widths = {head: None if width == ALL else width for head, width in chosen.items()}
    return Fit(widths, keep, held / (prices.length * len(chosen)), expected, prices)


def as_tokens(texts: str | Sequence[Any], tokenizer: Any) -> list[Any]:
    """Texts as sequences of tokens."""
    if isinstance(texts, str) or getattr(texts, "ndim", 0) == 1:
        texts = [texts]
    try:
        listed = list(texts)
    except TypeError:
        listed = []
    if listed and is_whole(listed[0], -(2**63), 2**63):  # the tokens of one text
        listed = [listed]
    if not listed:
        raise UserError(f"texts is {shown(texts)}; a text, or several, each as a string or its tokens, is needed")
    if not any(isinstance(text, str) for text in listed):
        return listed
    if tokenizer is None:
        raise UserError("texts are strings, and there is no tokenizer; pass tokenizer=, or the tokens of each text")
    return [tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
            for text in listed]  # fmt: skip


def check_tokens(model: Any, contexts: Sequence[Context]) -> None:
    """Raise an error for tokens that the model does not have."""
    size = model.get_input_embeddings().num_embeddings
    least, most = min(int(each.ids.min()) for each in contexts), max(int(each.ids.max()) for each in contexts)
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise UserError(f"texts have the token {wrong:,}; the model's tokens are from 0 to {size - 1:,}")


def check_share(keep: object) -> None:
    """Raise an error for a share that no cache can take."""
    if not is_number(keep) or not 0 < keep < 1:  # type: ignore[operator]
        raise UserError(f"keep is {shown(keep)}; a share of the cache's bytes between 0 and 1, such as 0.3, is needed")


def _saver(path: Path | None, also: Callable[[Prices], object] | None) -> Callable[[Prices], None]:
    def save(prices: Prices) -> None:
        if path is not None:
            prices.save(path)
        if also is not None:
            also(prices)

    return save
