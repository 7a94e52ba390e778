"""Training contexts: text and retrieval documents, packed. Each context is a function of its number and the seed.

So a resumed run sees the same contexts, and any context can be made without those before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from bayesattn.data.mixture import LEAST_RETRIEVAL, Mixture
from bayesattn.data.retrieval import Piece, document, haystack_text
from bayesattn.data.wordings import WordingSet, seed_key
from bayesattn.errors import UserError
from bayesattn.files import whole_lines, write_whole

Tokens = NDArray[np.int32]

# Texts that the tokenizer encodes in one call.
TEXTS_AT_ONCE = 512


def _encode(texts: Iterable[str], tokenizer: Any, before: list[int], after: list[int]) -> Iterator[Tokens]:
    """Each text as tokens, between the given tokens."""
    texts = iter(texts)
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            yield np.asarray([*before, *ids, *after], dtype=np.int32)


def encode_stream(texts: Iterable[str], tokenizer: Any) -> Tokens:
    """All texts as one array of tokens, with an end token before each text, if the tokenizer has one.

    Raises:
        UserError: there are no texts.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = list(_encode(texts, tokenizer, end, []))
    if not parts:
        raise UserError("the data set is empty; give it at least one document")
    return np.concatenate(parts)


def first_token(tokenizer: Any) -> list[int]:
    """The token that a document begins with; none if the tokenizer has no such token."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


class Contexts(Dataset[dict[str, Tensor]]):
    """Packed contexts with labels, loss weights and document ids.

    Each document begins with the tokenizer's first token, if it has one. Retrieval documents, and texts that leave room
    for another document, end with the end token, so that models learn to emit it.

    Args:
        stream: the text as tokens, from `encode_stream`.
        tokenizer: has an end token.
        mixture: what the contexts are made of.
        number: how many contexts there are.
        seed: other contexts for another seed.
        wording_set: the words of facts and questions.
    """

    def __init__(
        self,
        stream: Tokens,
        tokenizer: Any,
        mixture: Mixture,
        *,
        number: int,
        seed: int,
        wording_set: WordingSet = "train",
    ) -> None:
        if len(stream) <= mixture.context:
            raise UserError(
                f"the data set has {len(stream):,} tokens; one context needs at least {mixture.context + 1:,}"
            )
        self.stream, self.tokenizer, self.mixture = stream, tokenizer, mixture
        self.number, self.seed, self.wording_set = number, seed, wording_set
        self.weights = {
            "answer": mixture.answer_weight,
            "filler": mixture.filler_weight,
            "text": mixture.hay_weight,
            "no_question": 1.0,
            "end": 1.0,
        }

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.number:
            raise IndexError(f"context {index:,} is asked for; there are contexts 0 to {self.number - 1:,}")
        random = Random(f"{self.seed} {seed_key(self.wording_set)} {index}")
        context = self.mixture.context
        ids: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        while len(ids) < context:
            room = context - len(ids)
            length = random.randint(room // 4, room) if random.random() < self.mixture.short_share else room
            for piece in self._document(random, length, ends=length < room):
                ids += piece.ids
                weights += [self.weights[piece.kind]] * len(piece.ids)
            documents += [documents[-1] + 1 if documents else 0] * (len(ids) - len(documents))
        return _item(torch.tensor(ids[:context]), torch.tensor(documents[:context]), torch.tensor(weights[:context]))

    def _document(self, random: Random, length: int, *, ends: bool) -> list[Piece]:
        """About `length` tokens: a retrieval document with its end token, or text, which ends where a text does."""
        before, after = first_token(self.tokenizer), [self.tokenizer.eos_token_id]
        room = max(1, length - len(before))
        pieces: list[Piece] = []
        if length > LEAST_RETRIEVAL and random.random() < self.mixture.retrieval_share:
            haystack = self._haystack(random, room - 1)
            pieces = document(self.tokenizer, random, haystack, room - 1, self.wording_set, self.mixture)
        if pieces:
            return [Piece(before), *pieces, Piece(after, "end")]
        ids = [*self._text_to_end(random, room - 1), *after] if ends else self._text(random, room)
        return [Piece(before), Piece(ids, "no_question")]

    def _text(self, random: Random, length: int) -> list[int]:
        start = random.randrange(len(self.stream) - length)
        ids: list[int] = self.stream[start : start + length].tolist()
        return ids

    def _text_to_end(self, random: Random, length: int) -> list[int]:
        """The last tokens before the end of a text; earlier texts if it is shorter, and fewer for the first ones."""
        end = int(random.choice(self.text_ends))
        ids: list[int] = self.stream[max(0, end - length) : end].tolist()
        return ids

    @cached_property
    def text_ends(self) -> Tokens:
        """Positions in the stream after the last token of each text."""
        starts = np.flatnonzero(self.stream == self.tokenizer.eos_token_id)
        ends: Tokens = np.append(starts[starts > 0], len(self.stream)).astype(np.int32)
        return ends

    @cached_property
    def number_starts(self) -> Tokens:
        """Positions in the stream where a number begins."""
        digits = [int(i) for i in np.unique(self.stream) if self.tokenizer.decode([int(i)]).strip().isdigit()]
        is_digit = np.isin(self.stream, digits)
        starts: Tokens = np.flatnonzero(is_digit[1:] & ~is_digit[:-1]).astype(np.int32) + 1
        if not len(starts):
            raise UserError(
                f"numbers_share is {self.mixture.numbers_share}; the data set has no numbers, so 0 is needed"
            )
        return starts

    def _numbers(self, random: Random, length: int) -> list[int]:
        """Snippets of text with a number in each."""
        ids: list[int] = []
        while len(ids) < length:
            at = int(random.choice(self.number_starts))
            ids += self.stream[max(0, at - random.randint(2, 8)) : at + random.randint(2, 6)].tolist()
        return ids[:length]

    def _haystack(self, random: Random, length: int) -> Piece:
        """Real text, plain sentences, or a hard haystack; see `Mixture.hard_share`."""
        kind = random.random()
        if kind < 0.5:
            numbers = bool(self.mixture.numbers_share) and random.random() < self.mixture.numbers_share
            return Piece(self._numbers(random, length) if numbers else self._text(random, length))
        text = haystack_text(random, self.wording_set, length, hard=kind >= 1 - self.mixture.hard_share)
        return Piece(self.tokenizer.encode(text, add_special_tokens=False)[:length], "filler")


@dataclass(frozen=True)
class Place:
    """Where in a stream a context begins: at a token of a text, both counted from 0."""

    context: int
    text: int
    token: int


class StreamedContexts(IterableDataset[dict[str, Tensor]]):
    """Texts packed one after another and cut into contexts, without holding them in memory; an endless stream.

    Set `start` to the number of the first context to make.

    Args:
        texts: returns the texts, each time in the same order. After the last text the first follows.
        tokenizer: has an end token, which ends each text. Its first token begins them, if it has one.
        context: tokens of a context.
        places: a file that records where contexts begin, so that `start` needs no encoding of all text before it.
        place_every: contexts between two recorded places.
    """

    def __init__(
        self,
        texts: Callable[[], Iterable[str]],
        tokenizer: Any,
        context: int,
        places: Path | None = None,
        place_every: int = 1024,
    ) -> None:
        self.texts, self.tokenizer, self.context = texts, tokenizer, context
        self.places, self.place_every = places, place_every
        self.start = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        place = self._nearest(self.start)
        number, known = place.context, place.context
        rest: list[tuple[int, int, Tokens]] = []  # number of the text, first token left of it, tokens left
        held = 0
        for text, ids in self._texts(place):
            rest.append((text, place.token if text == place.text else 0, ids))
            held += len(ids)
            while held >= self.context:
                if number % self.place_every == 0 and number > known:
                    self._keep(Place(number, rest[0][0], rest[0][1]))
                    known = number
                parts, rest = _take(rest, self.context)
                held -= self.context
                if number >= self.start:
                    yield _packed(parts)
                number += 1

    def _texts(self, place: Place) -> Iterator[tuple[int, Tokens]]:
        """Numbered texts as tokens, from a place on; numbers go on when the texts repeat."""
        first, number = place.text, 0
        while True:
            before = number
            texts = iter(self.texts())
            for _ in islice(texts, max(0, first - number)):
                number += 1
            for ids in _encode(texts, self.tokenizer, first_token(self.tokenizer), [self.tokenizer.eos_token_id]):
                yield number, ids[place.token :] if number == place.text else ids
                number += 1
            if number == before:
                raise UserError("the data set is empty; give it at least one document")

    def _nearest(self, context: int) -> Place:
        lines = [] if self.places is None else whole_lines(self.places)
        places = [Place(*json.loads(line)) for line in lines]
        return max((p for p in places if p.context <= context), key=lambda p: p.context, default=Place(0, 0, 0))

    def _keep(self, place: Place) -> None:
        if self.places is not None and self._nearest(place.context) != place:
            lines = [*whole_lines(self.places), json.dumps([place.context, place.text, place.token])]
            write_whole(self.places, "".join(line + "\n" for line in lines))


def _take(parts: list[tuple[int, int, Tokens]], tokens: int) -> tuple[list[Tokens], list[tuple[int, int, Tokens]]]:
    """Split texts after `tokens` tokens: what is before, and what is left."""
    taken: list[Tokens] = []
    for index, (text, token, ids) in enumerate(parts):
        taken.append(ids[:tokens])
        if len(ids) >= tokens:
            left = [(text, token + tokens, ids[tokens:])] if len(ids) > tokens else []
            return taken, left + parts[index + 1 :]
        tokens -= len(ids)
    raise AssertionError("the texts have fewer tokens")


def _packed(parts: Sequence[Tokens]) -> dict[str, Tensor]:
    ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    documents = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    return _item(ids, documents, torch.ones(len(ids)))


def _item(ids: Tensor, documents: Tensor, weights: Tensor) -> dict[str, Tensor]:
    # The document before does not predict the first token of a document.
    labels = ids.masked_fill(documents != documents.roll(1), -100)
    return {"input_ids": ids, "labels": labels, "loss_weights": weights, "document_ids": documents}
