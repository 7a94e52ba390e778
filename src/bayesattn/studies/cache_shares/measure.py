"""Prompts with a pass key, read with a full cache and with caches that keep less of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bayesattn.adapt.add_prior import add_prior, remove_prior
from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.classes import ModelWithPrior
from bayesattn.adapt.parts import num_heads
from bayesattn.data.contexts import Tokens
from bayesattn.data.facts import draw_value
from bayesattn.errors import UserError
from bayesattn.evaluation.passkey import INTRO, NEEDLE, QUESTION
from bayesattn.evaluation.reader import Reader
from bayesattn.fit.allotment import positions_held
from bayesattn.fit.fitting import apply
from bayesattn.fit.price_files import Prices
from bayesattn.fit.prices import fingerprint_of, other_model
from bayesattn.priors import Sinks, Window
from bayesattn.studies.cache_shares.run import FITTED, FULL, WINDOW, Method, Way
from bayesattn.studies.study import Progress

DIGITS = 5


@dataclass(frozen=True)
class Trial:
    """Tokens of a prompt, those that follow in the text, and the question for its pass key with the answer."""

    prompt: Tensor
    following: Tensor
    question: Tensor
    answer: Tensor


@dataclass(frozen=True)
class Kind:
    """A way to keep the cache: its method, the share allowed, and the width of one window for all heads."""

    method: Method
    keep: float | None = None
    width: int | None = None


def measure(
    reader: Reader,
    stream: Tokens,
    fits: Sequence[Prices],
    shares: Sequence[float],
    prompts: int,
    scored: int,
    seed: int,
    done: Sequence[Way],
    progress: Progress[Any],
    cut_afterwards: bool = False,
) -> Iterator[list[Way]]:
    """All ways so far, after each prompt. Ways of an earlier measurement are continued.

    With `cut_afterwards` prompts are read with the full cache, whose keys the other caches then get.
    """
    ways = {(way.length, way.method, way.keep): way for way in done}
    for prices in sorted(fits, key=lambda each: each.length):
        kinds = [Kind(FULL)]
        for share in shares:
            kinds += [Kind(WINDOW, share, widest_window(prices, share)), Kind(FITTED, share)]
        keys = [(prices.length, kind.method, kind.keep) for kind in kinds]
        known = min(len(ways[key].losses) if key in ways else 0 for key in keys)
        for key in keys:
            if key in ways and len(ways[key].losses) > known:  # another share is new, so all prompts are read again
                ways.pop(key)
                known = 0
        for number in range(known, prompts):
            if progress.left() <= 0:
                return
            trial = make_trial(reader, stream, prices.length, scored, Random(f"{seed} {prices.length} {number}"))
            whole, full = None, None
            for kind, key in zip(kinds, keys, strict=True):
                progress.step(f"{prices.length:,} tokens, prompt {number + 1}: {kind.method}", number, prompts)
                with model_with(reader.model, kind, prices) as model:
                    read = read_prompt(model, trial) if full is None else (cut(model, full[0]), full[1])
                    if cut_afterwards and full is None:
                        full = copy.deepcopy(read[0]), read[1]
                    size, logits, found = score(model, trial, *read)
                whole = logits if whole is None else whole
                way = ways.get(key) or Way(prices.length, kind.method, size, [], [], [], kind.keep, kind.width)
                loss = float(cross_entropy(logits, trial.following))
                divergence = float(
                    (whole.softmax(-1) * (whole.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
                )
                ways[key] = replace(
                    way, bytes=max(size, way.bytes), losses=[*way.losses, loss],
                    divergences=[*way.divergences, divergence], found=[*way.found, found],
                )  # fmt: skip
            yield list(ways.values())


def widest_window(prices: Prices, keep: float) -> int:
    """The widest window for all heads whose cache takes no more than this share of the bytes."""
    heads = len({(head.layer, head.head) for head in prices.contexts[0]})
    layers = len({head.layer for head in prices.contexts[0]})
    most = keep * prices.length * heads // layers

    def fits(width: int) -> bool:
        return positions_held((width,) * (heads // layers), prices.length, prices.sinks) <= most

    low, high = 1, prices.length
    if not fits(low):
        raise UserError(f"keep is {keep:.1%}; at {prices.length:,} tokens no window takes so little")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@contextmanager
def model_with(model: Any, kind: Kind, prices: Prices) -> Iterator[Any]:
    """The model with the windows of one way, which it has in this block only."""
    if prices.fingerprint != fingerprint_of(model):
        raise UserError(other_model(model))
    if kind.method == FITTED:
        assert kind.keep is not None
        apply(model, prices, kind.keep)
    elif kind.method == WINDOW:
        assert kind.width is not None
        layers = attention_layers(model)
        priced = sorted({head.layer for head in prices.contexts[0]})
        add_prior(
            model,
            [Sinks(Window(num_heads(layers[layer]), kind.width), prices.sinks) for layer in priced],
            layers=priced,
        )
    try:
        yield model
    finally:
        if isinstance(model, ModelWithPrior):
            remove_prior(model)


@torch.no_grad()
def read_prompt(model: Any, trial: Trial) -> tuple[Any, Tensor]:
    """The cache after the prompt, and logits `[1, V]` of the next token."""
    cache = model.make_cache() if isinstance(model, ModelWithPrior) else None
    given = {} if cache is None else {"past_key_values": cache}
    out = model(input_ids=trial.prompt[None].to(model.device), use_cache=True, logits_to_keep=1, **given)
    return out.past_key_values, out.logits[0, -1:]


@torch.no_grad()
def cut(model: Any, full: Any) -> Any:
    """A cache of a model with windows that has got the keys and values of a full one, and keeps what it may."""
    cache = model.make_cache()
    layers = attention_layers(model)
    for number, (held, layer) in enumerate(zip(cache.caches, full.layers, strict=True)):
        k, v = layer.keys, layer.values
        held.content_spread = 0.0  # content does not matter to a hard edge
        held.softmax_scale = getattr(layers[number], "scaling", k.shape[-1] ** -0.5)
        held.attend(k.new_zeros(len(k), held.prior.num_heads, 0, k.shape[-1]), k, v)
    return cache


@torch.no_grad()
def score(model: Any, trial: Trial, cache: Any, last: Tensor) -> tuple[int, Tensor, bool]:
    """Bytes of a cache, logits of the tokens that follow the prompt in it, and whether the key is found."""
    size, device = bytes_of(cache), model.device
    asked = torch.cat([trial.question, trial.answer[:-1]])[None].to(device)
    copied = copy.deepcopy(cache)
    answers = model(input_ids=asked, past_key_values=copied, logits_to_keep=len(trial.answer)).logits[0].argmax(-1)
    after = model(input_ids=trial.following[None, :-1].to(device), past_key_values=cache).logits[0]
    logits = torch.cat([last, after]).float().cpu()
    return size, logits, bool((answers.cpu() == trial.answer).all())


def bytes_of(cache: Any) -> int:
    """What a cache holds, ours or one of transformers."""
    held = getattr(cache, "bytes", None)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) if held is None else int(held)


def make_trial(reader: Reader, stream: Tokens, length: int, scored: int, random: Random) -> Trial:
    """A prompt of `length` tokens of text with a pass key somewhere in it."""
    key = draw_value(random, "held-out", DIGITS)
    before, needle = [*reader.start, *reader.ids(INTRO)], reader.ids(" " + NEEDLE.format(key=key) + " ")
    room = length - len(before) - len(needle)
    if room < 1 or len(stream) < room + scored:
        raise UserError(
            f"the text has {len(stream):,} tokens; prompts of {length:,} tokens need "
            f"{max(room, 1) + scored:,}, and their pass key {len(before) + len(needle):,} of them"
        )
    start = random.randrange(len(stream) - room - scored + 1)
    text = torch.from_numpy(stream[start : start + room + scored].astype("int64"))
    place = random.randrange(room + 1)
    prompt = torch.cat([torch.tensor(before), text[:place], torch.tensor(needle), text[place:room]])
    question = reader.ids(" " + QUESTION)
    answer = reader.ids(" " + key)
    return Trial(prompt, text[room:], torch.tensor(question), torch.tensor(answer))
