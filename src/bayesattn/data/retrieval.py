"""Documents with facts in them and questions about the facts: to learn retrieval from, and to measure it.

What is used in training and what is held out never meet: wordings, attributes, entities, fillers and values of facts
of one split do not occur in the other. (Numbers of real text, and small ones in sentences made up, are what they are;
they are never asked for.) The standard pass-key prompt, with its bland filler, is in neither. Mistakes with the
held-out wordings have been looked at while recipes were made; a third set, the fresh ones, is there to be measured with
alone (single words of its sentences, but not of its names, occur among the random words of training).
"""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from random import Random
from typing import Any, Literal, get_args

import yaml

from bayesattn.data.text import Split, bundled

Worded = Literal["train", "held-out", "fresh"]


@dataclass(frozen=True)
class Wording:
    """The material of one split, or the fresh one.

    In a pattern {e}, {a} and {v} stand for entity, attribute and value, {w} for any word, {n} for a number, and
    brackets hold alternatives.
    """

    openings: tuple[str, ...]
    statements: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[str, ...]  # up to the answer
    attributes: tuple[str, ...]
    entities: tuple[str, ...]
    fillers: tuple[str, ...]


def vary(pattern: str, random: Random) -> str:
    """Choose one of the alternatives in each pair of brackets, inner ones first, and words for {w} and {n}."""
    while (inner := re.search(r"\[([^\[\]]*)\]", pattern)) is not None:
        pattern = pattern[: inner.start()] + random.choice(inner.group(1).split("|")) + pattern[inner.end() :]
    while "{w}" in pattern:
        pattern = pattern.replace("{w}", random.choice(WORDS), 1)
    return pattern.replace("{n}", str(random.randint(1, 2000)))


@dataclass(frozen=True)
class Fact:
    entity: str
    attribute: str
    value: str

    def put(self, pattern: str) -> str:
        """The pattern with the fact in it."""
        return pattern.format(e=self.entity, a=self.attribute, v=self.value)


def _load() -> tuple[dict[Worded, Wording], list[str]]:
    material = yaml.safe_load(files("bayesattn").joinpath("assets/wordings.yaml").read_text(encoding="utf-8"))
    wordings: dict[Worded, Wording] = {}
    for worded in get_args(Worded):
        wordings[worded] = Wording(**{kind: tuple(entries) for kind, entries in material[worded].items()})
    return wordings, material["words"]


WORDINGS, WORDS = _load()
# Tokens that a sentence of a haystack has at least, or nearly so.
LEAST_PART = 5

PASSKEY_INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASSKEY_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key? The pass key is"


def value_split(value: str) -> Split:
    """One value in eight is held out."""
    return "held-out" if zlib.crc32(value.encode()) % 8 == 0 else "train"


def draw_value(random: Random, split: Split, digits: int | None = None) -> str:
    """A number of 3 to 7 digits, or of `digits`, of the split."""
    while True:
        length = digits or random.randint(3, 7)
        value = "".join(random.choice(string.digits) for _ in range(length))
        if value_split(value) == split:
            return value


def draw_facts(random: Random, worded: Worded, number: int, digits: int | None = None) -> list[Fact]:
    """Facts that are easily confused: many share the entity or the attribute with another, never both."""
    wording, split = WORDINGS[worded], _split(worded)
    entities = [_entity(random, worded) for _ in range(2)]
    attributes = random.sample(wording.attributes, 2)
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < number:
        entity = random.choice(entities) if random.random() < 0.5 else _entity(random, worded)
        attribute = random.choice(attributes) if random.random() < 0.5 else random.choice(wording.attributes)
        facts.setdefault((entity, attribute), Fact(entity, attribute, draw_value(random, split, digits)))
    return list(facts.values())


def _split(worded: Worded) -> Split:
    """Whose values and made-up names go with the wordings."""
    return "train" if worded == "train" else "held-out"


def _entity(random: Random, worded: Worded) -> str:
    """A listed one, or now and then a name nobody has heard of: 4 to 6 letters in training, 7 or 8 held out."""
    if random.random() < 0.75:
        return random.choice(WORDINGS[worded].entities)
    letters = random.randint(4, 6) if worded == "train" else random.randint(7, 8)
    return "".join(random.choice("bcdfghklmnprstvz" if i % 2 == 0 else "aeiou") for i in range(letters)).capitalize()


def _words_of_names(split: Split) -> set[str]:
    return set(" ".join((*WORDINGS[split].attributes, *WORDINGS[split].entities)).lower().split())


def _words_of_patterns(split: Split) -> set[str]:
    wording = WORDINGS[split]
    patterns = (*wording.openings, *wording.statements, *wording.endings, *wording.questions)
    return set(re.findall(r"[a-z]+", " ".join(patterns).lower()))


@lru_cache(maxsize=1)
def running_words() -> tuple[str, ...]:
    """Words of the bundled text that training sees, in its order, without those that name only what is held out."""
    held_out = _words_of_names("held-out") - _words_of_names("train")
    return tuple(word for word in re.findall(r"\b[a-z]{1,9}\b", " ".join(bundled("train"))) if word not in held_out)


@lru_cache(maxsize=1)
def lexicon() -> tuple[str, ...]:
    """Each of those words of at least three letters once, without any that is part of a held-out name."""
    return tuple(sorted({word for word in running_words() if len(word) >= 3} - _words_of_names("held-out")))


@lru_cache(maxsize=1)
def other_words() -> tuple[str, ...]:
    """The lexicon without any word that only held-out wordings have."""
    held_out = _words_of_patterns("held-out") - _words_of_patterns("train")
    return tuple(word for word in lexicon() if word not in held_out)


def swapped(pattern: str, random: Random, share: float) -> str:
    """The pattern; in this share of cases with other words for half of its own, so that none can be relied on."""
    if not share or random.random() >= share:
        return pattern

    def other(word: re.Match[str]) -> str:
        return word[0] if random.random() < 0.5 else random.choice(other_words())

    return re.sub(r"(?<![\w{'])[A-Za-z]+(?![\w}'])", other, pattern)


def novel_facts(random: Random, number: int) -> list[Fact]:
    """Facts about anything, named by words at random: only matching all of them tells one from another.

    Names within a document have words in common, as "key number" and "room number" do.
    """
    common = random.sample(lexicon(), 6)

    def words(shared: Sequence[str], most: int) -> str:
        number = random.randint(1, most)
        return " ".join(random.choice(shared if random.random() < 0.5 else lexicon()) for _ in range(number))

    def entity() -> str:
        kind = random.random()
        if kind < 0.4:
            return words(common[:3], 2).title()
        return f"the {words(common[:3], 2)}" if kind < 0.8 else _entity(random, "train")

    entities, attributes = [entity() for _ in range(2)], [words(common[3:], 2) for _ in range(2)]
    facts: dict[tuple[frozenset[str], ...], Fact] = {}
    while len(facts) < number:
        e = random.choice(entities) if random.random() < 0.5 else entity()
        a = random.choice(attributes) if random.random() < 0.5 else words(common[3:], 2)
        named = frozenset(e.lower().split()), frozenset(a.split())  # in another order it is the same name
        facts.setdefault(named, Fact(e, a, draw_value(random, "train")))
    return list(facts.values())


def novel_wording(random: Random, question: bool, early: float = 0.25) -> str:
    """Entity, attribute and value in any order, with any words between them; a question ends where the value comes.

    `early` is the share of statements in which the value is told before both are named.
    """

    def some(*numbers: int) -> list[str]:
        return [random.choice(running_words()) for _ in range(random.choice(numbers))]

    def clause(parts: Sequence[str]) -> list[str]:
        return [word for part in parts for word in (*some(0, 0, 1, 1, 2, 3), part)]

    parts = ["{e}", "{a}"]
    random.shuffle(parts)
    if question:
        asked = " ".join(clause(parts))
        if random.random() < 0.5:  # "What is the code of Anna? The code is"
            asked += random.choice(("? ", "? ", ". ", ": "))
            asked += " ".join(clause(random.sample(parts, random.randint(0, 2))))
        return asked + random.choice((" is", ":", " =", "", " " + " ".join(some(1)), " " + " ".join(some(1, 2))))
    parts.insert(2 if random.random() < 1.0 - early else random.randint(0, 1), "{v}")
    told = " ".join([*clause(parts), *some(0, 0, 0, 1, 2)]) + random.choice((".", ".", "!", ";"))
    if random.random() < 0.2:  # "The code of Anna is 123. 123 is the code."
        told += " " + " ".join([*clause(["{v}"]), *some(0, 0, 1, 2, 3)]) + "."
    return told


def state(fact: Fact, random: Random, worded: Worded, swap: float = 0.0) -> str:
    """The fact in one of the wordings; a share `swap` of its parts have other words in them."""
    wording = WORDINGS[worded]
    opening, statement, ending = (
        fact.put(swapped(vary(random.choice(patterns), random), random, swap))
        for patterns in (wording.openings, wording.statements, wording.endings)
    )
    if opening.endswith((", ", "that ")):
        return _capital(opening) + statement + ending
    return _capital(opening) + _capital(statement) + ending


def ask(fact: Fact, others: Sequence[Fact], random: Random, worded: Worded, swap: float = 0.0) -> str:
    """A question about the fact, up to the answer, that none of the other facts answers."""
    shared = sum(other.attribute == fact.attribute for other in others) > 1
    patterns = [p for p in WORDINGS[worded].questions if "{e}" in p or not shared]
    return _capital(fact.put(swapped(vary(random.choice(patterns), random), random, swap)))


def haystack_text(random: Random, worded: Worded, tokens: int, *, hard: bool) -> str:
    """About so many tokens, or more, of sentences that tell nothing.

    A hard one also has words without sense, bare numbers and facts about others.
    """
    parts: list[str] = []
    while len(parts) * LEAST_PART < tokens:
        choice = random.random()
        if not hard or choice < 0.3:
            parts.append(random.choice(WORDINGS[worded].fillers))
        elif choice < 0.6:
            parts.append(" ".join(random.choice(WORDS) for _ in range(random.randint(2, 8))))
        elif choice < 0.8:
            parts.append(" ".join(_number(random, worded) for _ in range(random.randint(1, 3))))
        else:
            parts.append(state(draw_facts(random, worded, 1)[0], random, worded))
    return " ".join(parts)


def _number(random: Random, worded: Worded) -> str:
    """Any number; in training none that is held out."""
    while True:
        number = str(random.randint(0, 99_999))
        if worded != "train" or value_split(number) == "train":
            return number


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Piece:
    """Tokens of a document: of an answer, which only the facts can tell; of a haystack made up; of text after which
    nothing is asked; or any other.
    """

    ids: list[int]
    kind: Literal["answer", "filler", "unasked", "text"] = "text"


def document(
    tokenizer: Any,
    random: Random,
    haystack: Piece,
    length: int,
    split: Split,
    novel: float = 0.0,
    early: float = 0.25,
    swap: float = 0.0,
    facts: Sequence[int] = (1, 1, 2, 2, 3, 4),
    questions: Sequence[int] = (1, 1, 2, 3),
    spaced: bool = False,
) -> list[Piece]:
    """Facts in a haystack and questions about them, of at most `length` tokens: for training.

    As many facts and questions as were drawn, or fewer if there is no room; none at all in a text too short for one.
    `novel` is the share of documents whose facts are about anything, half of them in words at random too, a share
    `early` of which tell the value first; `swap` is the share of openings, statements, endings and questions with other
    words in them; `facts` and `questions` are the numbers to choose from. `spaced` tells
    whether the space before a value is of the answer, or of the question.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    number, asked = random.choice(facts), random.choice(questions)
    anything = bool(novel) and random.random() < novel
    if anything:
        number = random.randint(2, 5)  # with only one there is nothing to match
    while True:
        drawn = novel_facts(random, number) if anything else draw_facts(random, split, number)
        stated = [encode(" " + _stated(fact, random, split, anything, early, swap)) for fact in drawn]
        ending = []
        for fact in random.sample(drawn, min(number, asked)):
            question, answer = " " + _asked(fact, drawn, random, split, anything, swap), fact.value + "."
            question, answer = (question, " " + answer) if spaced else (question + " ", answer)
            ending += [Piece(encode(question)), Piece(encode(answer), "answer")]
        room = length - sum(map(len, stated)) - sum(len(piece.ids) for piece in ending)
        if room >= 0:
            break
        if number == 1 and asked <= 1:
            return []
        number, asked = max(1, number - 1), max(min(1, asked), asked - 1)
    hay, kind = haystack.ids[:room], "unasked" if haystack.kind == "text" and not asked else haystack.kind
    places = sorted(random.randint(0, len(hay)) for _ in stated)
    pieces, before = [], 0
    for place, ids in zip(places, stated, strict=True):
        pieces += [Piece(hay[before:place], kind), Piece(ids)]
        before = place
    return [piece for piece in [*pieces, Piece(hay[before:], kind), *ending] if piece.ids]


def _stated(fact: Fact, random: Random, split: Split, anything: bool, early: float, swap: float) -> str:
    if anything and random.random() < 0.5:
        return fact.put(swapped(novel_wording(random, question=False, early=early), random, swap))
    return state(fact, random, split, swap)


def _asked(fact: Fact, others: Sequence[Fact], random: Random, split: Split, anything: bool, swap: float) -> str:
    if anything and random.random() < 0.5:
        return fact.put(swapped(novel_wording(random, question=True), random, swap))
    return ask(fact, others, random, split, swap)
