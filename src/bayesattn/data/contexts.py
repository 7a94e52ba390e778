"""Training contexts: documents of text and of retrieval packed in a row, each context a function of its number alone.

So the order is the same however often a run is interrupted, and any context can be made without those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from bayesattn.data.retrieval import Piece, document, haystack_text
from bayesattn.data.text import Split
from bayesattn.errors import UserError

Tokens = NDArray[np.int32]

# Shorter documents than this have no room for facts and questions.
LEAST_RETRIEVAL = 64


@dataclass(frozen=True)
class Mixture:
    """What contexts are made of.

    Args:
        context: tokens of each.
        retrieval: share of the documents that have facts and questions; the others are text.
        short: share of the documents that end before the context does, so that another follows.
        answer_weight, hay_weight: what a token of an answer counts in the loss, and any other of such a document; a
            token of text counts 1.
    """

    context: int = 128
    retrieval: float = 0.6
    short: float = 0.3
    answer_weight: float = 10.0
    hay_weight: float = 0.2


def encode_stream(texts: Iterable[str], tokenizer: Any) -> Tokens:
    """All texts in a row, an end token before each."""
    parts: list[Tokens] = []
    batch: list[str] = []

    def flush() -> None:
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            parts.append(np.asarray([tokenizer.eos_token_id, *ids], dtype=np.int32))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 512:
            flush()
    if batch:
        flush()
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
            text = len(pieces) == 2
            for piece in pieces:
                weight = 1.0 if text else self.mixture.answer_weight if piece.answer else self.mixture.hay_weight
                ids += piece.ids
                weights += [weight] * len(piece.ids)
            documents += [documents[-1] + 1 if documents else 0] * (len(ids) - len(documents))
        input_ids = torch.tensor(ids[:context])
        document_ids = torch.tensor(documents[:context])
        # The end token before a document follows from nothing in the one before.
        labels = input_ids.masked_fill(document_ids != document_ids.roll(1), -100)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "loss_weights": torch.tensor(weights[:context]),
            "document_ids": document_ids,
        }

    def _pieces(self, random: Random, length: int) -> list[Piece]:
        pieces: list[Piece] = []
        if length >= LEAST_RETRIEVAL and random.random() < self.mixture.retrieval:
            pieces = document(self.tokenizer, random, self._haystack(random, length), length, self.split)
        return pieces or [Piece(self._text(random, max(1, length)))]

    def _text(self, random: Random, length: int) -> list[int]:
        start = random.randrange(len(self.stream) - length)
        ids: list[int] = self.stream[start : start + length].tolist()
        return ids

    def _haystack(self, random: Random, length: int) -> list[int]:
        """Real text, plain sentences, or a hard one: facts about others, bare numbers, words without sense."""
        kind = random.random()
        if kind < 0.5:
            return self._text(random, length)
        text = haystack_text(random, self.split, length, hard=kind >= 0.7)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids[:length]
