"""Tasks in the sense of RULER: needles among needles, chains of variables, common words; any tokenizer, no network.

Prompts are worded and answers judged as in NVIDIA's RULER and in lm-eval, so that scores compare. The text that needles
are hidden in is the bundled one where those use essays, and keys are made of our own words.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
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


def sized(name: str, seed: int, length: int, reader: Reader) -> Prompt:
    """The longest prompt that leaves room for the answer in `length` tokens, found by bisection."""
    make, least = _maker(name, length), _least(name)
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
    while len((tried := ids(high))[0]) <= room:
        if high >= length:  # there is no more to add
            break
        low, (found, example), high = high, tried, high * 2
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
    return {"variables": 5, "common-words": 10}.get(name, max(1, kind.keys * kind.values))


def _maker(name: str, length: int) -> Callable[[Random, int], Example]:
    """A function of random numbers and of how much haystack there is."""
    if name == "variables":
        return _variables
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


def _variables(random: Random, units: int, hops: int = 4) -> Example:
    names: list[str] = []
    while len(names) < hops + 1:
        name = "".join(random.choice(string.ascii_uppercase) for _ in range(5))
        names += [name] if name not in names else []
    value = str(random.randint(10_000, 99_998))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    sentences = [PASSKEY_FILLER + "\n"] * units
    for number, place in enumerate(sorted(random.sample(range(units), len(chain)))):
        sentences.insert(place + number, chain[number])
    context = " ".join(sentences).replace(". \n", ".\n")
    text = TRACKING.format(context=context, query=value)
    return Example(text, TRACKED.format(number=hops + 1, query=value), tuple(names))


def _common_words(random: Random, units: int, common: int, uncommon: int, number: int = 10) -> Example:
    words = random.sample(lexicon(), min(len(lexicon()), units + number))
    listed = words[:number] * common + words[number:] * uncommon
    random.shuffle(listed)
    context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return Example(COMMON.format(context=context), COMMONEST, tuple(words[:number]))


@lru_cache(maxsize=1)
def _sentences() -> tuple[str, ...]:
    """Of the held-out part of the bundled text."""
    text = " ".join(" ".join(bundled("held-out")).split())
    return tuple(sentence.strip() + "." for sentence in text.split(". ") if sentence.strip())
