"""Training contexts: documents of text and of retrieval packed in a row, each context a function of its number alone.

So the order is the same however often a run is interrupted, and any context can be made without those before it.
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

from bayesattn.data.retrieval import Piece, document, haystack_text
from bayesattn.data.text import Split
from bayesattn.errors import UserError
from bayesattn.files import whole_lines, write_whole

Tokens = NDArray[np.int32]

# Shorter documents than this have no room for facts and questions.
LEAST_RETRIEVAL = 64
TEXTS_AT_ONCE = 512
# Contexts between the places of a stream that are kept to go on from.
PLACES_EVERY = 1024


@dataclass(frozen=True)
class Mixture:
    """What contexts are made of.

    Args:
        context: tokens of each.
        retrieval: share of the documents with room for them, 64 tokens, that have facts and questions; the others are
            text.
        short: share of the documents that end before the context does, so that another follows.
        novel: share of those with facts whose facts are about anything, half of them in any words rather than in the
            wordings of the split: what only matching can solve.
        early: share of their statements in random words that tell the value before they have named what it is of: hard,
            as a causal model cannot mark the value with a name that it has not read.
        swap: share of the openings, statements, endings and questions in which other words take the place of half of
            the words: so that neither a value nor an answer is known by the word before it.
        hard: share of the haystacks of such documents, at most 0.5, that have facts about others, bare numbers and
            words without sense in them; half are real text, and the rest plain sentences.
        numbers: share of the haystacks of real text that are put together of snippets with numbers in them: in a long
            text there are many, and each may be mistaken for a value.
        facts, questions: how many there are in such a document, one of these numbers, if there is room; facts about
            anything are 2 to 5. With no question now and then, facts in a text do not tell that one will come.
        spaced: whether the space before an answer is part of it: only then does the model learn that an answer comes
            after any question, and not only after one that ends as most do.
        answer_weight, filler_weight, hay_weight: what a token of an answer counts in the loss, one of a haystack that
            is not real text, and any other of such a document; a token of text that no question follows counts 1.
    """

    context: int = 128
    retrieval: float = 0.6
    short: float = 0.3
    novel: float = 0.0
    early: float = 0.25
    swap: float = 0.0
    hard: float = 0.3
    numbers: float = 0.0
    facts: tuple[int, ...] = (1, 1, 2, 2, 3, 4)
    questions: tuple[int, ...] = (1, 1, 2, 3)
    spaced: bool = False
    answer_weight: float = 10.0
    filler_weight: float = 0.2
    hay_weight: float = 0.2


def _encode(texts: Iterable[str], tokenizer: Any) -> Iterator[Tokens]:
    """Each text, with an end token before it if there is one."""
    before = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = iter(texts)
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            yield np.asarray([*before, *ids], dtype=np.int32)


def encode_stream(texts: Iterable[str], tokenizer: Any) -> Tokens:
    """All texts in a row, an end token before each."""
    parts = list(_encode(texts, tokenizer))
    if not parts:
        raise UserError("the data set is empty; give it at least one document")
    return np.concatenate(parts)


class Contexts(Dataset[dict[str, Tensor]]):
    """Packed contexts with labels, loss weights and document ids."""

    def __init__(
        self, stream: Tokens, tokenizer: Any, mixture: Mixture, *, number: int, seed: int, split: Split = "train"
    ) -> None:
        if len(stream) <= mixture.context:
            raise UserError(
                f"the data set has {len(stream):,} tokens; a context alone needs {mixture.context + 1:,} of them"
            )
        self.stream, self.tokenizer, self.mixture = stream, tokenizer, mixture
        self.number, self.seed, self.split = number, seed, split
        self.weights = {
            "answer": mixture.answer_weight, "filler": mixture.filler_weight, "text": mixture.hay_weight, "unasked": 1.0
        }  # fmt: skip

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.number:
            raise IndexError(f"there are {self.number:,} contexts, and no number {index:,}")
        random = Random(f"{self.seed} {self.split} {index}")
        context, end = self.mixture.context, self.tokenizer.eos_token_id
        ids: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        while len(ids) < context:
            room = context - len(ids)
            length = random.randint(room // 4, room) if random.random() < self.mixture.short else room
            pieces = [Piece([end]), *self._pieces(random, length - 1)]
            for piece in pieces:
                ids += piece.ids
                weights += [self.weights[piece.kind]] * len(piece.ids)
            documents += [documents[-1] + 1 if documents else 0] * (len(ids) - len(documents))
        return _item(torch.tensor(ids[:context]), torch.tensor(documents[:context]), torch.tensor(weights[:context]))

    def _pieces(self, random: Random, length: int) -> list[Piece]:
        pieces: list[Piece] = []
        if length >= LEAST_RETRIEVAL and random.random() < self.mixture.retrieval:
            mixture, hay = self.mixture, self._haystack(random, length)
            pieces = document(
                self.tokenizer,
                random,
                hay,
                length,
                self.split,
                novel=mixture.novel,
                early=mixture.early,
                swap=mixture.swap,
                facts=mixture.facts,
                questions=mixture.questions,
                spaced=mixture.spaced,
            )
        return pieces or [Piece(self._text(random, max(1, length)), "unasked")]

    def _text(self, random: Random, length: int) -> list[int]:
        start = random.randrange(len(self.stream) - length)
        ids: list[int] = self.stream[start : start + length].tolist()
        return ids

    @cached_property
    def numerals(self) -> Tokens:
        """Where in the stream a number begins."""
        digits = [int(i) for i in np.unique(self.stream) if self.tokenizer.decode([int(i)]).strip().isdigit()]
        number = np.isin(self.stream, digits)
        found: Tokens = np.flatnonzero(number[1:] & ~number[:-1]).astype(np.int32) + 1
        if not len(found):
            raise UserError("data.numbers asks for numbers of the text, and there are none in the data set")
        return found

    def _numbers(self, random: Random, length: int) -> list[int]:
        """Snippets of text with a number in each."""
        ids: list[int] = []
        while len(ids) < length:
            at = int(random.choice(self.numerals))
            ids += self.stream[max(0, at - random.randint(2, 8)) : at + random.randint(2, 6)].tolist()
        return ids[:length]

    def _haystack(self, random: Random, length: int) -> Piece:
        """Real text, plain sentences, or a hard one: facts about others, bare numbers, words without sense."""
        kind = random.random()
        if kind < 0.5:
            numbers = bool(self.mixture.numbers) and random.random() < self.mixture.numbers
            return Piece(self._numbers(random, length) if numbers else self._text(random, length))
        text = haystack_text(random, self.split, length, hard=kind >= 1 - self.mixture.hard)
        return Piece(self.tokenizer.encode(text, add_special_tokens=False)[:length], "filler")


@dataclass(frozen=True)
class Place:
    """Where in a stream a context begins: so many tokens into the text of this number."""

    context: int
    text: int
    token: int


class StreamedContexts(IterableDataset[dict[str, Tensor]]):
    """Texts packed in a row and cut into contexts, none of them held in memory; after the last the first comes again.

    Args:
        texts: makes the texts anew, always in the same order.
        tokenizer: has an end token, which goes before each text.
        context: tokens of each.
        places: a file that keeps where every 1,024th context begins, so that `start` is found without encoding all
            that is before it.
    """

    def __init__(
        self, texts: Callable[[], Iterable[str]], tokenizer: Any, context: int, places: Path | None = None
    ) -> None:
        self.texts, self.tokenizer, self.context, self.places = texts, tokenizer, context, places
        self.start = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        place = self._nearest(self.start)
        number, known = place.context, place.context
        rest: list[tuple[int, int, Tokens]] = []  # text, its token, and what is left of it
        held = 0
        for text, ids in self._texts(place):
            rest.append((text, place.token if text == place.text else 0, ids))
            held += len(ids)
            while held >= self.context:
                if number % PLACES_EVERY == 0 and number > known:
                    self._keep(Place(number, rest[0][0], rest[0][1]))
                    known = number
                parts, rest = _take(rest, self.context)
                held -= self.context
                if number >= self.start:
                    yield _packed(parts)
                number += 1

    def _texts(self, place: Place) -> Iterator[tuple[int, Tokens]]:
        """From a place on, over and over, numbered on."""
        first, number = place.text, 0
        while True:
            before = number
            texts = iter(self.texts())
            for _ in islice(texts, max(0, first - number)):
                number += 1
            for ids in _encode(texts, self.tokenizer):
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
    """The first so many tokens of texts in a row, and what is left."""
    taken: list[Tokens] = []
    for index, (text, token, ids) in enumerate(parts):
        taken.append(ids[:tokens])
        if len(ids) >= tokens:
            left = [(text, token + tokens, ids[tokens:])] if len(ids) > tokens else []
            return taken, left + parts[index + 1 :]
        tokens -= len(ids)
    raise AssertionError("there are fewer tokens than asked for")


def _packed(parts: Sequence[Tokens]) -> dict[str, Tensor]:
    ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    documents = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    return _item(ids, documents, torch.ones(len(ids)))


def _item(ids: Tensor, documents: Tensor, weights: Tensor) -> dict[str, Tensor]:
    # The first token of a document follows from nothing in the one before.
    labels = ids.masked_fill(documents != documents.roll(1), -100)
    return {"input_ids": ids, "labels": labels, "loss_weights": weights, "document_ids": documents}
