"""The words of retrieval tasks: patterns that state facts and ask for them, in three sets that share nothing.

- `train`: the only set in training data.
- `validation`: we looked at mistakes with it while we made the recipes.
- `fresh`: for measuring only. Single words of its sentences, but none of its names, may occur in training as random
  words.

The standard pass-key prompt is in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from random import Random
from typing import Literal, get_args

import yaml

from bayesattn.data.text import bundled

WordingSet = Literal["train", "validation", "fresh"]


@dataclass(frozen=True)
class Wording:
    """The patterns and names of one set.

    In a pattern, {e}, {a} and {v} stand for entity, attribute and value, {w} for any word and {n} for a number.
    Brackets hold alternatives.
    """

    openings: tuple[str, ...]
    statements: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[str, ...]
    """Each ends where the answer begins."""
    attributes: tuple[str, ...]
    entities: tuple[str, ...]
    fillers: tuple[str, ...]
    """Sentences without facts, for haystacks."""


def _load() -> tuple[dict[WordingSet, Wording], list[str]]:
    material = yaml.safe_load(files("bayesattn").joinpath("assets/wordings.yaml").read_text(encoding="utf-8"))
    wordings: dict[WordingSet, Wording] = {}
    for name in get_args(WordingSet):
        wordings[name] = Wording(**{kind: tuple(entries) for kind, entries in material[name].items()})
    return wordings, material["words"]


WORDINGS, WORDS = _load()


def seed_key(wording_set: WordingSet) -> str:
    """The name of the set in seeds of random numbers."""
    # Published results used the seed "held-out" for the validation set; another seed would change every prompt.
    return "held-out" if wording_set == "validation" else wording_set


def expand_alternatives(pattern: str, random: Random) -> str:
    """Choose one alternative in each pair of brackets, inner pairs first, and words for {w} and {n}."""
    while (inner := re.search(r"\[([^\[\]]*)\]", pattern)) is not None:
        pattern = pattern[: inner.start()] + random.choice(inner.group(1).split("|")) + pattern[inner.end() :]
    while "{w}" in pattern:
        pattern = pattern.replace("{w}", random.choice(WORDS), 1)
    return pattern.replace("{n}", str(random.randint(1, 2000)))


def _words_of_names(wording_set: WordingSet) -> set[str]:
    wording = WORDINGS[wording_set]
    return set(" ".join((*wording.attributes, *wording.entities)).lower().split())


def _words_of_patterns(wording_set: WordingSet) -> set[str]:
    wording = WORDINGS[wording_set]
    patterns = (*wording.openings, *wording.statements, *wording.endings, *wording.questions)
    return set(re.findall(r"[a-z]+", " ".join(patterns).lower()))


@lru_cache(maxsize=1)
def running_words() -> tuple[str, ...]:
    """Words of the bundled training text, in its order, without words that only validation names have."""
    excluded = _words_of_names("validation") - _words_of_names("train")
    return tuple(word for word in re.findall(r"\b[a-z]{1,9}\b", " ".join(bundled("train"))) if word not in excluded)


@lru_cache(maxsize=1)
def lexicon() -> tuple[str, ...]:
    """The different `running_words` of at least three letters, without any word of a validation name."""
    return tuple(sorted({word for word in running_words() if len(word) >= 3} - _words_of_names("validation")))


@lru_cache(maxsize=1)
def other_words() -> tuple[str, ...]:
    """The lexicon without words that only validation patterns have."""
    excluded = _words_of_patterns("validation") - _words_of_patterns("train")
    return tuple(word for word in lexicon() if word not in excluded)


def swap_words(pattern: str, random: Random, share: float) -> str:
    """With probability `share`, replace about half of the pattern's words by random ones; else leave it unchanged."""
    if not share or random.random() >= share:
        return pattern

    def replacement(word: re.Match[str]) -> str:
        return word[0] if random.random() < 0.5 else random.choice(other_words())

    return re.sub(r"(?<![\w{'])[A-Za-z]+(?![\w}'])", replacement, pattern)


def _some_words(random: Random, *numbers: int) -> list[str]:
    """Running words, as many as one of the numbers."""
    return [random.choice(running_words()) for _ in range(random.choice(numbers))]


def _clause(random: Random, parts: Sequence[str]) -> list[str]:
    """The parts in their order, with 0 to 3 random words before each."""
    return [word for part in parts for word in (*_some_words(random, 0, 0, 1, 1, 2, 3), part)]


def novel_statement(random: Random, early_share: float = 0.25) -> str:
    """A pattern that states a fact: entity, attribute and value in random order among random words.

    With probability `early_share` the value comes before the entity or the attribute.
    """
    parts = ["{e}", "{a}"]
    random.shuffle(parts)
    parts.insert(2 if random.random() < 1.0 - early_share else random.randint(0, 1), "{v}")
    words = [*_clause(random, parts), *_some_words(random, 0, 0, 0, 1, 2)]
    statement = " ".join(words) + random.choice((".", ".", "!", ";"))
    if random.random() < 0.2:  # "The code of Anna is 123. 123 is the code."
        statement += " " + " ".join([*_clause(random, ["{v}"]), *_some_words(random, 0, 0, 1, 2, 3)]) + "."
    return statement


def novel_question(random: Random) -> str:
    """A pattern that asks for a value: entity and attribute in random order among random words."""
    parts = ["{e}", "{a}"]
    random.shuffle(parts)
    question = " ".join(_clause(random, parts))
    if random.random() < 0.5:  # "What is the code of Anna? The code is"
        question += random.choice(("? ", "? ", ". ", ": "))
        question += " ".join(_clause(random, random.sample(parts, random.randint(0, 2))))
    one_word, more_words = " ".join(_some_words(random, 1)), " ".join(_some_words(random, 1, 2))
    return question + random.choice((" is", ":", " =", "", " " + one_word, " " + more_words))
