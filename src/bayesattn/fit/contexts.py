"""Texts on which heads are measured, with passages that recur at the end, so that heads which look them up show.

A passage is a run of tokens drawn at random from the text, so only its first occurrence says how it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from bayesattn.errors import UserError, is_whole, shown

# Tokens of a passage, and those of them that are given before the others are asked for.
PASSAGE, CUE = 24, 4
# Passages of a context: one in so many tokens, this many at least and at most.
TOKENS_PER_PASSAGE, FEWEST_PASSAGES, MOST_PASSAGES = 256, 2, 16
# The recurring passages may take this share of a context.
LARGEST_SHARE = 4
SHORTEST = 4 * FEWEST_PASSAGES * PASSAGE
# Queries of the text that are measured, spread over the second half of a context.
TEXT_ROWS = 256


@dataclass(frozen=True)
class Context:
    """Tokens `[N]`, the positions of queries in the text, and those of queries whose next token is in a passage."""

    ids: Tensor
    text_rows: Tensor
    recall_rows: Tensor


def make_contexts(texts: Sequence[Any], length: int, number: int, seed: int = 0) -> list[Context]:
    """`number` contexts of `length` tokens from texts, each of which is a sequence of tokens.

    Each context is of one text, and texts take turns; contexts of the same text do not overlap.

    Raises:
        UserError: a text is shorter than its contexts.
    """
    streams = [_tokens(text, place) for place, text in enumerate(texts)]
    contexts = []
    for index in range(number):
        place, turn = index % len(streams), index // len(streams)
        stream, turns = streams[place], -(-(number - place) // len(streams))
        needed = length * turns
        if len(stream) < needed:
            which = "the text" if len(streams) == 1 else f"text {place + 1}"
            times = f"{turns} × " if turns > 1 else ""
            raise UserError(
                f"{which} has {len(stream):,} tokens, which is shorter than the {times}{length:,} that are needed; "
                "give a longer text, a smaller length or fewer contexts"
            )
        start = (len(stream) - needed) // turns * turn + length * turn
        contexts.append(_with_passages(stream[start : start + length], Random(f"{seed} {index}")))
    return contexts


def check_length(length: object) -> int:
    """The length as a number of tokens, or an error."""
    if not isinstance(length, int) or not is_whole(length, SHORTEST, 2**24):
        raise UserError(f"length is {shown(length)}; a whole number of tokens from {SHORTEST:,} is needed")
    return length


def _tokens(text: Any, place: int) -> Tensor:
    try:
        ids = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0, 0)
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool or ids.is_complex():
        raise UserError(f"text {place + 1} is {shown(text)}; the numbers of its tokens in a row are needed")
    return ids.long().cpu()


def _with_passages(text: Tensor, random: Random) -> Context:
    """The text with passages at random places in it, and again at its end; as many tokens as before."""
    length = len(text)
    number = min(MOST_PASSAGES, max(FEWEST_PASSAGES, length // TOKENS_PER_PASSAGE), length // LARGEST_SHARE // PASSAGE)
    hay = length - 2 * number * PASSAGE
    passages = [torch.tensor(random.choices(text.tolist(), k=PASSAGE)) for _ in range(number)]
    # One in each stretch of the text, so that every distance occurs.
    places = [random.randrange(hay * each // number, hay * (each + 1) // number) for each in range(number)]
    parts, used = [], 0
    for place, passage in zip(places, passages, strict=True):
        parts += [text[used:place], passage]
        used = place
    recalled = random.sample(passages, number)
    ids = torch.cat([*parts, text[used:hay], *recalled])
    end = hay + number * PASSAGE
    text_rows = torch.linspace(length // 2, end - 1, min(TEXT_ROWS, end - length // 2)).long()
    recall = torch.arange(CUE - 1, PASSAGE - 1)
    recall_rows = (end + PASSAGE * torch.arange(number)[:, None] + recall).flatten()
    return Context(ids, text_rows, recall_rows)
