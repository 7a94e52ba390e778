"""Tasks in the sense of RULER: needles among needles, chains of variables, common words; any tokenizer, no network.

Prompts are worded and answers judged as in NVIDIA's RULER and in lm-eval, so that scores compare. The text that needles
are hidden in is the bundled one where those use essays, and keys are made of our own words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, Literal
from uuid import UUID

from bayesattn.data.retrieval import PASSKEY_FILLER, WORDS, lexicon
from bayesattn.data.text import bundled
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt, generate
from bayesattn.files import joined_commands

Values = Literal["numbers", "words", "uuids"]
Hay = Literal["repeat", "text", "needle"]

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
QUESTION_OF_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
)
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above."
)
TRACKED = (
    "Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assgined the "
    "value {query}, they are:"
)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMONEST = "Answer: The top 10 words that appear most often in the list are:"

# Of a chain of variables; the solved example has at most so many tokens, and sentences in steps.
HOPS = 4
EXAMPLE_TOKENS, EXAMPLE_STEP = 500, 5
# How many words are common.
NUMBER = 10


@dataclass(frozen=True)
class Kind:
    """One of the tasks.

    Args:
        answer_tokens: most that a model may say, which are left free at the end of the length.
        haystack, keys, values, queries, key_kind, value_kind: of needles: what they are hidden in, how many keys there
            are, with how many values each, how many are asked for, and what keys and values look like.
    """

    answer_tokens: int = 128
    haystack: Hay = "repeat"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: Values = "words"
    value_kind: Values = "numbers"


KINDS: dict[str, Kind] = {
    "single": Kind(),
    "single-text": Kind(haystack="text"),
    "single-uuid": Kind(haystack="text", value_kind="uuids"),
    "multikey": Kind(haystack="text", keys=4),
    "multikey-needles": Kind(haystack="needle"),
    "multikey-uuids": Kind(haystack="needle", key_kind="uuids", value_kind="uuids"),
    "multivalue": Kind(haystack="text", values=4),
    "multiquery": Kind(haystack="text", keys=4, queries=4),
    "variables": Kind(answer_tokens=30),
    "common-words": Kind(answer_tokens=120),
}


@dataclass(frozen=True)
class Example:
    """A prompt as text, what the answer begins with, and all that it must have in it."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One of `KINDS`, for `bayesattn.evaluation.trials`."""

    name: str = "single"

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise UserError(f"there is no task {self.name!r}; there are {', '.join(KINDS)}")

    @property
    def kind(self) -> str:
        return "needle"

    @property
    def seeded(self) -> str:
        return self.name

    @property
    def counts_answer(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def prompts(self, reader: Reader) -> MakePrompt:
        _check_words(reader, self.name)

        def make(random: Random, length: int, _: float | None) -> Prompt:
            return sized(self.name, random.randrange(2**32), length, reader)

        return make

    @property
    def answer_tokens(self) -> int:
        return KINDS[self.name].answer_tokens

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        said = generate(reader, prompts, self.answer_tokens)
        return [score(text, prompt.answers) for text, prompt in zip(said, prompts, strict=True)]


def score(said: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in what was said, in capitals or not."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


def together(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of several tasks, as `bayesattn.evaluation.trials` keeps each, in one of the same form.

    Each cell tells its task; the commands are all that had a part in it.
    """
    command = joined_commands(*(content["command"] for content in contents))
    names = [content["settings"]["name"] for content in contents]
    cells = [{"task": name, **cell} for name, content in zip(names, contents, strict=True) for cell in content["cells"]]
    settings = {**contents[0]["settings"], "name": ",".join(names)}
    return {**contents[0], "settings": settings, "command": command, "cells": cells}


def sized(name: str, seed: int, length: int, reader: Reader) -> Prompt:
    """The longest prompt that leaves room for the answer in `length` tokens, found by bisection."""
    make, least, most = _maker(name, length, reader), _least(name), _most(name, length)
    room = length - KINDS[name].answer_tokens

    def ids(units: int) -> tuple[list[int], Example]:
        example = make(Random(seed), units)
        return [*reader.start, *reader.ids(example.text + " " + example.prefix)], example

    found, example = ids(least)
    if len(found) > room:
        raise UserError(
            f"the task {name} needs at least {len(found) + KINDS[name].answer_tokens:,} tokens; {length:,} are given"
        )
    low, high = least, least * 2
    while high < most and len((tried := ids(high))[0]) <= room:
        low, (found, example), high = high, tried, high * 2
    if high >= most:
        high = most
        if len((tried := ids(high))[0]) <= room:
            # How many tokens all words have depends a little on which of them are common.
            longest = (len(tried[0]) + KINDS[name].answer_tokens) * 99 // 100
            raise UserError(f"the task {name} has words for at most about {longest:,} tokens; {length:,} are given")
    while high - low > 1:
        middle = (low + high) // 2
        tried = ids(middle)
        if len(tried[0]) <= room:
            low, (found, example) = middle, tried
        else:
            high = middle
    return Prompt(found, example.answers)


def _least(name: str) -> int:
    kind = KINDS[name]
    return {"variables": HOPS + 1, "common-words": NUMBER}.get(name, max(1, kind.keys * kind.values))


def _most(name: str, length: int) -> int:
    """How much haystack there is; no part of one is shorter than a token."""
    return len(lexicon()) - NUMBER if name == "common-words" else length


def _check_words(reader: Reader, name: str) -> None:
    """Refuse a tokenizer that loses what is asked for, in capitals or not: no answer could be right."""
    kind = KINDS[name]
    if name == "variables":
        words = [string.ascii_uppercase, string.digits]
        text = "VAR {} = {}".format(*words)
    elif name == "common-words":
        words = [string.ascii_lowercase]
        text = f"1. {words[0]}"
    else:
        looks = {"numbers": string.digits, "words": f"{WORDS[0]}-{string.ascii_lowercase}"}
        looks["uuids"] = "01234567-89ab-4cde-8f01-23456789abcd"
        words = [looks[kind.key_kind], looks[kind.value_kind]]
        text = NEEDLE.format(kind=kind.value_kind, key=words[0], value=words[1])
    kept = reader.tokenizer.decode(reader.ids(text)).lower()
    if not all(word.lower() in kept for word in words):
        raise UserError(
            f"the tokenizer of {reader.name} cannot represent {text!r}; its answers could not be told apart"
        )


def _maker(name: str, length: int, reader: Reader) -> Callable[[Random, int], Example]:
    """A function of random numbers and of how much haystack there is."""
    if name == "variables":
        example = _example_units(reader)
        return lambda random, units: _solved_first(random, units, example)
    if name == "common-words":
        often = (30, 3) if length >= 4096 else (6, 1)
        return lambda random, units: _common_words(random, units, *often)
    return lambda random, units: _needles(random, units, KINDS[name])


def _needles(random: Random, units: int, kind: Kind) -> Example:
    keys = [_draw(random, kind.key_kind) for _ in range(kind.keys)]
    values = {key: [_draw(random, kind.value_kind) for _ in range(kind.values)] for key in keys}
    needles = [NEEDLE.format(kind=kind.value_kind, key=key, value=value) for key in keys for value in values[key]]
    random.shuffle(needles)
    if kind.haystack == "text":
        sentences = _sentences()
        hay = [sentences[i % len(sentences)] for i in range(units)]
        between = " "
    else:
        between = "\n"
        hay = [PASSKEY_FILLER] * units
        if kind.haystack == "needle":
            hay = [
                NEEDLE.format(
                    kind=kind.value_kind, key=_draw(random, kind.key_kind), value=_draw(random, kind.value_kind)
                )
                for _ in range(units)
            ]
    for place, needle in zip(sorted(random.sample(range(units), len(needles)), reverse=True), needles, strict=True):
        hay.insert(place, needle)
    asked = random.sample(keys, kind.queries)
    query = f"{', '.join(asked[:-1])}, and {asked[-1]}" if len(asked) > 1 else asked[0]
    answers = tuple(value for key in asked for value in values[key])
    one = len(answers) == 1
    named = kind.value_kind[:-1] if one else kind.value_kind
    text = (QUESTION_OF_ONE if one else QUESTION).format(kind=named, context=between.join(hay), query=query)
    verb = "is" if one else "are"
    return Example(text, f"The special magic {named} for {query} mentioned in the provided text {verb}", answers)


def _draw(random: Random, kind: Values) -> str:
    if kind == "numbers":
        return str(random.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(UUID(int=random.getrandbits(128), version=4))
    return f"{random.choice(WORDS)}-{random.choice(lexicon())}"


def _variables(random: Random, units: int, letters: int = 5) -> Example:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(random.choice(string.ascii_uppercase) for _ in range(letters))
        names += [name] if name not in names else []
    value = str(random.randint(10_000, 99_998))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    sentences = [PASSKEY_FILLER + "\n"] * units
    if units <= len(chain):  # too few to choose places among
        sentences = re.findall(r"[^.\n]+\.|\n", "".join(sentences))
    for number, place in enumerate(sorted(random.sample(range(len(sentences)), len(chain)))):
        sentences.insert(place + number, chain[number])
    context = " ".join(sentences).replace(". \n", ".\n")
    text = TRACKING.format(context=context, query=value)
    return Example(text, TRACKED.format(number=HOPS + 1, query=value), tuple(names))


def _solved(random: Random, units: int) -> str:
    """A short one with its answer; its names have three letters, so that they are not those of the question."""
    example = _variables(random, units, letters=3)
    return f"{example.text} {example.prefix}  {' '.join(example.answers)}"


def _solved_first(random: Random, units: int, example_units: int) -> Example:
    """One that is solved, then the one that is asked."""
    solved = _solved(random, example_units)
    asked = _variables(random, units)
    return Example(f"{solved}\n\n\n\n{asked.text}", asked.prefix, asked.answers)


def _example_units(reader: Reader) -> int:
    """Of the longest example that has few enough tokens with room for an answer."""
    units, room = EXAMPLE_STEP, EXAMPLE_TOKENS - KINDS["variables"].answer_tokens
    while len(reader.ids(_solved(Random(0), units + EXAMPLE_STEP))) <= room:
        units += EXAMPLE_STEP
    return units


def _common_words(random: Random, units: int, common: int, uncommon: int) -> Example:
    words = random.sample(lexicon(), units + NUMBER)
    listed = words[:NUMBER] * common + words[NUMBER:] * uncommon
    random.shuffle(listed)
    context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return Example(COMMON.format(context=context), COMMONEST, tuple(words[:NUMBER]))


@lru_cache(maxsize=1)
def _sentences() -> tuple[str, ...]:
    """Of the held-out part of the bundled text."""
    text = " ".join(" ".join(bundled("held-out")).split())
    return tuple(sentence.strip() + "." for sentence in text.split(". ") if sentence.strip())
