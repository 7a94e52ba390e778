"""Retrieval documents for training: facts in a haystack, then questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

from bayesattn.data.facts import Fact, ask, draw_facts, novel_facts, state, value_split
from bayesattn.data.mixture import Mixture
from bayesattn.data.wordings import WORDINGS, WORDS, WordingSet, novel_question, novel_statement, swap_words

# A sentence of a haystack has about this many tokens, or more.
LEAST_PART = 5


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a document, with one loss weight.

    `kind` is `answer`; `filler`, a haystack that is not real text; `no_question`, text without questions after it;
    `end`, the end token of a retrieval document; or `text`, anything else.
    """

    ids: list[int]
    kind: Literal["answer", "end", "filler", "no_question", "text"] = "text"


def haystack_text(random: Random, wording_set: WordingSet, tokens: int, *, hard: bool) -> str:
    """Sentences without facts, about `tokens` tokens or more.

    A hard haystack also has random words, bare numbers and other facts in the words of the set.
    """
    parts: list[str] = []
    while len(parts) * LEAST_PART < tokens:
        choice = random.random()
        if not hard or choice < 0.3:
            parts.append(random.choice(WORDINGS[wording_set].fillers))
        elif choice < 0.6:
            parts.append(" ".join(random.choice(WORDS) for _ in range(random.randint(2, 8))))
        elif choice < 0.8:
            parts.append(" ".join(_number(random, wording_set) for _ in range(random.randint(1, 3))))
        else:
            parts.append(state(draw_facts(random, wording_set, 1)[0], random, wording_set))
    return " ".join(parts)


def _number(random: Random, wording_set: WordingSet) -> str:
    """Any number; in training none of the held-out values."""
    while True:
        number = str(random.randint(0, 99_999))
        if wording_set != "train" or value_split(number) == "train":
            return number


def document(
    tokenizer: Any, random: Random, haystack: Piece, length: int, wording_set: WordingSet, mixture: Mixture
) -> list[Piece]:
    """A retrieval document of at most `length` tokens, as `mixture` describes it.

    Facts and questions become fewer until there is room for them. Without room for one of each there is no document,
    and the list is empty.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    num_facts, num_questions = random.choice(mixture.facts), random.choice(mixture.questions)
    novel = bool(mixture.novel_share) and random.random() < mixture.novel_share
    if novel:
        num_facts = random.randint(2, 5)  # a single fact needs no matching
    while True:
        facts = novel_facts(random, num_facts) if novel else draw_facts(random, wording_set, num_facts)
        statements = [encode(" " + _statement(fact, random, wording_set, novel, mixture)) for fact in facts]
        ending = []
        for fact in random.sample(facts, min(num_facts, num_questions)):
            question = " " + _question(fact, facts, random, wording_set, novel, mixture)
            answer = fact.value + "."
            question, answer = (question, " " + answer) if mixture.spaced else (question + " ", answer)
            ending += [Piece(encode(question)), Piece(encode(answer), "answer")]
        room = length - sum(map(len, statements)) - sum(len(piece.ids) for piece in ending)
        if room >= 0:
            break
        if num_facts == 1 and num_questions <= 1:
            return []
        num_facts, num_questions = max(1, num_facts - 1), max(min(1, num_questions), num_questions - 1)
    hay, kind = haystack.ids[:room], haystack.kind
    if kind == "text" and not num_questions:
        kind = "no_question"
    places = sorted(random.randint(0, len(hay)) for _ in statements)
    pieces, before = [], 0
    for place, ids in zip(places, statements, strict=True):
        pieces += [Piece(hay[before:place], kind), Piece(ids)]
        before = place
    return [piece for piece in [*pieces, Piece(hay[before:], kind), *ending] if piece.ids]


def _statement(fact: Fact, random: Random, wording_set: WordingSet, novel: bool, mixture: Mixture) -> str:
    if novel and random.random() < 0.5:
        return fact.fill(swap_words(novel_statement(random, mixture.early_share), random, mixture.swap_share))
    return state(fact, random, wording_set, mixture.swap_share)


def _question(
    fact: Fact, facts: Sequence[Fact], random: Random, wording_set: WordingSet, novel: bool, mixture: Mixture
) -> str:
    if novel and random.random() < 0.5:
        return fact.fill(swap_words(novel_question(random), random, mixture.swap_share))
    return ask(fact, facts, random, wording_set, mixture.swap_share)
