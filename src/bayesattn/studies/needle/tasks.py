"""RULER's tasks for any tokenizer, without a network: needles among needles, chains of variables, common words.

Prompts and scores follow NVIDIA's RULER and lm-eval, so that scores can be compared. Two things differ: the haystack is
the bundled text instead of essays, and keys consist of our own words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, Literal
from uuid import UUID

from bayesattn.data.text import bundled
from bayesattn.data.wordings import WORDS, lexicon
from bayesattn.errors import UserError, shown
from bayesattn.evaluation.passkey import FILLER
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

# Assignments after the first in a chain of variables.
HOPS = 4
# The solved example before a chain: tokens at most, answer included, and sentences by which it grows.
EXAMPLE_TOKENS, EXAMPLE_STEP = 500, 5
# Common words that the answer lists.
NUMBER = 10


@dataclass(frozen=True)
class Kind:
    """Settings of a task.

    Args:
        answer_tokens: tokens that a model may generate; a prompt leaves room for them in its length.
        haystack: text around the needles: a repeated sentence, the bundled text, or other needles.
        keys: keys in a prompt.
        values: values of each key.
        queries: keys that the question asks for.
        key_kind: what a key looks like.
        value_kind: what a value looks like.
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
    """A prompt as text, the words that begin its answer, and the answers to find."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One of `KINDS`, for `bayesattn.evaluation.trials`.

    Raises:
        UserError: there is no task of this name.
    """

    name: str = "single"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in KINDS:
            raise UserError(f"there is no task {shown(self.name)}; there are {', '.join(KINDS)}")

    @property
    def seed_key(self) -> str:
        return self.name

    @property
    def counts_answer(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def prompts(self, reader: Reader) -> MakePrompt:
        _check_words(reader, self.name)

        def make(random: Random, length: int, _: float | None) -> Prompt:
            return longest_prompt(self.name, random.randrange(2**32), length, reader)

        return make

    @property
    def answer_tokens(self) -> int:
        return KINDS[self.name].answer_tokens

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        texts = generate(reader, prompts, self.answer_tokens)
        return [score(text, prompt.answers) for text, prompt in zip(texts, prompts, strict=True)]


def score(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in the text, in upper or lower case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def longest_prompt(name: str, seed: int, length: int, reader: Reader) -> Prompt:
    """The longest prompt that leaves room for the answer in `length` tokens, found by bisection.

    Raises:
        UserError: the length is too short, or the task has too few words for it.
    """
    make, least, most = _maker(name, length, reader), _least(name), _most(name, length)
    room = length - KINDS[name].answer_tokens

    def ids(units: int) -> tuple[list[int], Example]:
        example = make(Random(seed), units)
        return [*reader.start, *reader.ids(example.text + " " + example.prefix)], example

    longest, example = ids(least)
    if len(longest) > room:
        raise UserError(
            f"the task {name} needs at least {len(longest) + KINDS[name].answer_tokens:,} tokens; {length:,} are given"
        )
    low, high = least, least * 2
    while high < most and len((tried := ids(high))[0]) <= room:
        low, (longest, example), high = high, tried, high * 2
    if high >= most:
        high = most
        if len((tried := ids(high))[0]) <= room:
            # Which words are common changes the number of tokens a little.
            limit = (len(tried[0]) + KINDS[name].answer_tokens) * 99 // 100
            raise UserError(f"the task {name} has words for at most about {limit:,} tokens; {length:,} are given")
    while high - low > 1:
        middle = (low + high) // 2
        tried = ids(middle)
        if len(tried[0]) <= room:
            low, (longest, example) = middle, tried
        else:
            high = middle
    return Prompt(longest, example.answers)


def _least(name: str) -> int:
    """Units of haystack (sentences, needles or words) that the task needs."""
    kind = KINDS[name]
    return {"variables": HOPS + 1, "common-words": NUMBER}.get(name, max(1, kind.keys * kind.values))


def _most(name: str, length: int) -> int:
    """Units of haystack that there can be; each has at least one token."""
    return len(lexicon()) - NUMBER if name == "common-words" else length


def _check_words(reader: Reader, name: str) -> None:
    """Refuse a tokenizer that loses characters of the answers, because no answer could be right."""
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
        raise UserError(f"the tokenizer of {reader.name} cannot represent {text!r}; one that keeps its words is needed")


def _maker(name: str, length: int, reader: Reader) -> Callable[[Random, int], Example]:
    """A function that makes an example from random numbers and a number of haystack units."""
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
        hay = [FILLER] * units
        if kind.haystack == "needle":
            hay = [
                NEEDLE.format(
                    kind=kind.value_kind, key=_draw(random, kind.key_kind), value=_draw(random, kind.value_kind)
                )
                for _ in range(units)
            ]
    for place, needle in zip(sorted(random.sample(range(units), len(needles)), reverse=True), needles, strict=True):
        hay.insert(place, needle)
    targets = random.sample(keys, kind.queries)
    query = f"{', '.join(targets[:-1])}, and {targets[-1]}" if len(targets) > 1 else targets[0]
    answers = tuple(value for key in targets for value in values[key])
    one = len(answers) == 1
    noun = kind.value_kind[:-1] if one else kind.value_kind
    text = (QUESTION_OF_ONE if one else QUESTION).format(kind=noun, context=between.join(hay), query=query)
    verb = "is" if one else "are"
    return Example(text, f"The special magic {noun} for {query} mentioned in the provided text {verb}", answers)


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
    sentences = [FILLER + "\n"] * units
    if units <= len(chain):  # too few to choose places among
        sentences = re.findall(r"[^.\n]+\.|\n", "".join(sentences))
    for number, place in enumerate(sorted(random.sample(range(len(sentences)), len(chain)))):
        sentences.insert(place + number, chain[number])
    context = " ".join(sentences).replace(". \n", ".\n")
    text = TRACKING.format(context=context, query=value)
    return Example(text, TRACKED.format(number=HOPS + 1, query=value), tuple(names))


def _solved(random: Random, units: int) -> str:
    """A short example with its answer. Its variables have three letters, so that they differ from the question's."""
    example = _variables(random, units, letters=3)
    return f"{example.text} {example.prefix}  {' '.join(example.answers)}"


def _solved_first(random: Random, units: int, example_units: int) -> Example:
    """A solved example, then the question."""
    solved = _solved(random, example_units)
    question = _variables(random, units)
    return Example(f"{solved}\n\n\n\n{question.text}", question.prefix, question.answers)


def _example_units(reader: Reader) -> int:
    """Units of the longest solved example within `EXAMPLE_TOKENS`, with room for an answer."""
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
    """Sentences of the held-out split of the bundled text."""
    text = " ".join(" ".join(bundled("held-out")).split())
    return tuple(sentence.strip() + "." for sentence in text.split(". ") if sentence.strip())
