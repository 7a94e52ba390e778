"""Facts: an attribute of an entity has a value. They are drawn at random, and easily confused with each other.

Values and invented names of training never occur in evaluation, and the other way round.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bayesattn.data.text import Split
from bayesattn.data.wordings import WORDINGS, WordingSet, expand_alternatives, lexicon, swap_words


@dataclass(frozen=True)
class Fact:
    entity: str
    attribute: str
    value: str

    def fill(self, pattern: str) -> str:
        """The pattern with entity, attribute and value in their places."""
        return pattern.format(e=self.entity, a=self.attribute, v=self.value)


def value_split(value: str) -> Split:
    """The split of a value: one value in eight is held out from training."""
    return "held-out" if zlib.crc32(value.encode()) % 8 == 0 else "train"


def draw_value(random: Random, split: Split, digits: int | None = None) -> str:
    """A number of the split, with `digits` digits or 3 to 7.

    One number in five for training has only two different digits. So models learn to copy runs of a digit, too.
    """
    while True:
        length = digits or random.randint(3, 7)
        few = split == "train" and random.random() < 0.2
        choices = random.sample(string.digits, 2) if few else string.digits
        value = "".join(random.choice(choices) for _ in range(length))
        if value_split(value) == split:
            return value


def draw_facts(random: Random, wording_set: WordingSet, number: int, digits: int | None = None) -> list[Fact]:
    """Facts with names of the set. Many share an entity or an attribute, but no two share both."""
    wording, split = WORDINGS[wording_set], _split(wording_set)
    entities = [_entity(random, wording_set) for _ in range(2)]
    attributes = random.sample(wording.attributes, 2)
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < number:
        entity = random.choice(entities) if random.random() < 0.5 else _entity(random, wording_set)
        attribute = random.choice(attributes) if random.random() < 0.5 else random.choice(wording.attributes)
        facts.setdefault((entity, attribute), Fact(entity, attribute, draw_value(random, split, digits)))
    return list(facts.values())


def _split(wording_set: WordingSet) -> Split:
    return "train" if wording_set == "train" else "held-out"


def _entity(random: Random, wording_set: WordingSet) -> str:
    """A listed entity or, one time in four, an invented name: 4 to 6 letters for training, 7 or 8 otherwise."""
    if random.random() < 0.75:
        return random.choice(WORDINGS[wording_set].entities)
    letters = random.randint(4, 6) if wording_set == "train" else random.randint(7, 8)
    return "".join(random.choice("bcdfghklmnprstvz" if i % 2 == 0 else "aeiou") for i in range(letters)).capitalize()


def novel_facts(random: Random, number: int) -> list[Fact]:
    """Training facts named by random words, so that only matching the names tells them apart.

    Names within a document share words, as "key number" and "room number" do.
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
        name = frozenset(e.lower().split()), frozenset(a.split())  # the same words in another order are the same name
        facts.setdefault(name, Fact(e, a, draw_value(random, "train")))
    return list(facts.values())


def state(fact: Fact, random: Random, wording_set: WordingSet, swap_share: float = 0.0) -> str:
    """The fact as a sentence in the words of the set; see `swap_words` for `swap_share`."""
    wording = WORDINGS[wording_set]
    opening, statement, ending = (
        fact.fill(swap_words(expand_alternatives(random.choice(patterns), random), random, swap_share))
        for patterns in (wording.openings, wording.statements, wording.endings)
    )
    if opening.endswith((", ", "that ")):
        return _capitalize(opening) + statement + ending
    return _capitalize(opening) + _capitalize(statement) + ending


def ask(fact: Fact, facts: Sequence[Fact], random: Random, wording_set: WordingSet, swap_share: float = 0.0) -> str:
    """A question that only this one of the facts answers; it ends where the answer begins."""
    shared = sum(other.attribute == fact.attribute for other in facts) > 1
    patterns = [pattern for pattern in WORDINGS[wording_set].questions if "{e}" in pattern or not shared]
    return _capitalize(fact.fill(swap_words(expand_alternatives(random.choice(patterns), random), random, swap_share)))


def _capitalize(text: str) -> str:
    """With its first letter in upper case; unlike `str.capitalize`, the rest stays as it is."""
    return text[:1].upper() + text[1:]
