"""What training contexts are made of."""

# No postponed annotations: `strict` checks settings by their types, and cannot where these are strings.
import math
from collections.abc import Mapping
from dataclasses import dataclass

from huggingface_hub.dataclasses import strict

from bayesattn.errors import UserError, plain_errors

# Shorter documents have no room for facts and questions.
LEAST_RETRIEVAL = 64
# Facts, or questions, in a document.
MOST_FACTS = 20

# Tokens of the longest context, and the largest weight of a loss.
LONGEST_CONTEXT = 2**24
LARGEST_WEIGHT = 10**6

# `strict` takes an int for a float only if both are allowed.
Number = float | int


@plain_errors
@strict
@dataclass
class Mixture:
    """The mixture of text and retrieval documents in training contexts.

    A retrieval document has facts in a haystack, then questions about them. A share is a probability from 0 to 1.

    Raises:
        UserError: a setting is out of range, or does not fit another.
    """

    context: int = 128
    """Tokens of a context."""

    retrieval_share: Number = 0.6
    """Share of retrieval documents among those of at least 64 tokens; all others are plain text."""

    short_share: Number = 0.3
    """Share of documents that end before the context does, so that another follows."""

    novel_share: Number = 0.0
    """Share of retrieval documents with facts about random words. Half of their sentences are random words, too.

    Only matching names solves these.
    """

    early_share: Number = 0.25
    """Share of statements in random words that give the value before the full name.

    These are hard: when a causal model reads the value, it does not know the name yet.
    """

    swap_share: Number = 0.0
    """Share of sentence parts and questions in which random words replace half of the words.

    So the word before a value, or before an answer, does not give it away.
    """

    hard_share: Number = 0.3
    """Share of haystacks, at most 0.5, with other facts, bare numbers and random words.

    Half of all haystacks are real text; the rest are plain sentences.
    """

    numbers_share: Number = 0.0
    """Share of the real-text haystacks that consist of snippets around numbers.

    A long text has many numbers, and a model can mistake each of them for a value.
    """

    facts: tuple[int, ...] = (1, 1, 2, 2, 3, 4)
    """Numbers of facts in a document, each equally likely; fewer if there is no room. Novel documents have 2 to 5."""

    questions: tuple[int, ...] = (1, 1, 2, 3)
    """Numbers of questions in a document, each equally likely. With 0 among them, a fact need not have a question."""

    spaced: bool = False
    """Whether the space before an answer is part of the answer, or of the question.

    If it is part of the answer, the model learns to answer after any question, however it ends.
    """

    answer_weight: Number = 10.0
    """Loss weight of a token of an answer. Text without questions has weight 1."""

    filler_weight: Number = 0.2
    """Loss weight of a token of a haystack that is not real text."""

    hay_weight: Number = 0.2
    """Loss weight of any other token of a retrieval document."""

    def __post_init__(self) -> None:
        if self.context < 2:
            raise UserError(f"context is {self.context}; at least 2 tokens are needed")
        for name in ("retrieval", "short", "novel", "early", "swap", "hard", "numbers"):
            share, most = getattr(self, f"{name}_share"), 0.5 if name == "hard" else 1
            if not 0 <= share <= most:
                raise UserError(f"{name}_share is {share}; a share from 0 to {most} is needed")
        for name in ("answer_weight", "filler_weight", "hay_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; a number of at least 0 is needed")
        weights = ("answer_weight", "filler_weight", "hay_weight")
        check_most(self, {"context": LONGEST_CONTEXT} | dict.fromkeys(weights, LARGEST_WEIGHT))
        for name, least in {"facts": 1, "questions": 0}.items():
            numbers = getattr(self, name)
            if not any(numbers) or not all(least <= number <= MOST_FACTS for number in numbers):
                rest = "" if least else ", not all of them 0"
                raise UserError(
                    f"{name} is {list(numbers)}; whole numbers from {least} to {MOST_FACTS} are needed{rest}"
                )
        if self.retrieval_share and self.context <= LEAST_RETRIEVAL:
            raise UserError(
                f"context is {self.context} and retrieval_share {self.retrieval_share}; facts and questions need a "
                f"context of more than {LEAST_RETRIEVAL} tokens, or a share of 0"
            )


def check_most(settings: object, limits: Mapping[str, int]) -> None:
    """Raise an error for a setting above its limit."""
    for name, most in limits.items():
        if getattr(settings, name) > most:
            raise UserError(f"{name} is {getattr(settings, name):,}; at most {most:,} is allowed")
