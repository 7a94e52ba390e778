"""Pass-key retrieval: a key is hidden in a haystack, and a question at the end asks for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch

from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.facts import ask, draw_facts, draw_value, state
from bayesattn.data.retrieval import haystack_text
from bayesattn.data.text import BUNDLED, documents
from bayesattn.data.wordings import WORDINGS, WordingSet, seed_key
from bayesattn.errors import UserError, is_whole, shown
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt, generate
from bayesattn.files import content_of

INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

# Tokens of a hard haystack; longer prompts repeat it.
HARD_TOKENS = 65_536
# Tokens of a haystack from a file.
LEAST_HAYSTACK = 100
# Too few of the shorter keys are held out from training.
LEAST_DIGITS = 3
BLAND, HARD, TEXT = "bland", "hard", "text"
# Ends of sentences; a line break is one.
ENDINGS = (".", "!", "?", "\n", "。", "！", "？")


@dataclass(frozen=True)
class Task:
    """What a prompt contains, and how its answer is scored.

    Args:
        wording: `standard`, the usual pass-key prompt; or a wording set, `train`, `validation` or `fresh`: several
            competing facts in its words.
        haystack: `bland` (the usual sentences), `hard` (other facts, bare numbers, random words), `text` (held-out
            documents of the bundled text) or a text file. The default is bland for the standard wording, else text.
        needles: least and most competing facts; the standard wording has one.
        digits: of each key. No key occurs in training.
        teacher_forced: predict each digit after the true digits, not after generated ones.

    Raises:
        UserError: a setting is not allowed.
    """

    wording: Literal["standard", "train", "validation", "fresh"] = "standard"
    haystack: str = ""
    needles: tuple[int, int] = (3, 5)
    digits: int = 5
    teacher_forced: bool = False

    def __post_init__(self) -> None:
        if self.wording not in (allowed := ("standard", *WORDINGS)):
            hint = "; held-out is now called validation" if str(self.wording) == "held-out" else ""
            raise UserError(f"the wording is {shown(self.wording)}; allowed are {', '.join(allowed)}{hint}")
        if not isinstance(self.needles, tuple) or [is_whole(n, -(2**40), 2**40) for n in self.needles] != [True, True]:
            raise UserError(f"the numbers of keys are {shown(self.needles)}; the least and the most of them are needed")
        if not 1 <= self.needles[0] <= self.needles[1] <= 20:
            raise UserError(f"{self.needles[0]} to {self.needles[1]} keys are asked for; 1 to 20 are allowed")
        if not is_whole(self.digits, LEAST_DIGITS, 50):
            raise UserError(f"keys of {shown(self.digits)} digits are asked for; {LEAST_DIGITS} to 50 are allowed")
        if not isinstance(self.haystack, str):
            raise UserError(f"the haystack is {shown(self.haystack)}; bland, hard, text or a text file is needed")
        if not isinstance(self.teacher_forced, bool):
            raise UserError(f"teacher_forced is {shown(self.teacher_forced)}; True or False is needed")
        if not self.haystack:
            object.__setattr__(self, "haystack", BLAND if self.wording == "standard" else TEXT)

    @property
    def seed_key(self) -> str:
        return "standard" if self.wording == "standard" else seed_key(self.wording)

    @property
    def answer_tokens(self) -> int:
        return self.digits + 3

    @property
    def counts_answer(self) -> bool:
        return False

    def settings(self) -> dict[str, Any]:
        content = {} if self.haystack in (BLAND, HARD, TEXT) else content_of(self.haystack)
        return {**asdict(self), "needles": list(self.needles), **content}

    def prompts(self, reader: Reader) -> MakePrompt:
        hay = _haystack(reader, self)
        check_keys(reader, self.digits)
        if self.wording == "standard":
            return _standard(reader, self, hay)
        return _competing(reader, self, hay, self.wording)

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        """1 if the answer begins with the key and no other digit follows it, else 0."""
        if self.teacher_forced:
            return [float(_predicts(reader, prompt)) for prompt in prompts]
        texts = generate(reader, prompts, self.answer_tokens)
        return [float(is_right(text, prompt.answers[0])) for text, prompt in zip(texts, prompts, strict=True)]


class Haystack:
    """A text from which to draw passages of any length; it repeats if necessary."""

    def __init__(self, reader: Reader, ids: Sequence[int] | Tokens) -> None:
        self.ids = np.asarray(ids, dtype=np.int32)
        closing = [
            int(i) for i in np.unique(self.ids) if reader.tokenizer.decode([int(i)]).rstrip(" ").endswith(ENDINGS)
        ]
        self.ends_sentence = np.isin(self.ids, closing)
        if not self.ends_sentence.any():  # without sentences, needles may go anywhere
            self.ends_sentence[:] = True

    def draw(self, random: Random, room: int) -> tuple[list[int], list[int]]:
        """`room` tokens up to the end of a sentence, and the places between sentences, from 0 to `room`."""
        end = int(random.choice(np.flatnonzero(self.ends_sentence))) + 1
        positions = np.arange(end - room, end) % len(self.ids)
        return self.ids[positions].tolist(), [0, *(np.flatnonzero(self.ends_sentence[positions]) + 1).tolist()]


def _standard(reader: Reader, task: Task, hay: Haystack) -> MakePrompt:
    """The usual pass-key prompt. The training data contains neither it nor its bland filler."""
    intro, question = reader.ids(INTRO), reader.ids(" " + QUESTION)

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        key = draw_value(random, "held-out", task.digits)
        needle = reader.ids(" " + NEEDLE.format(key=key))
        return _hide([needle], 0, question, key, length, random, hay, [*reader.start, *intro], depth)

    return make


def _competing(reader: Reader, task: Task, hay: Haystack, wording_set: WordingSet) -> MakePrompt:
    """Several facts that are easily confused, with held-out values; the question asks for one of them."""

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        for _ in range(1000):  # in a short prompt only few and short facts have room
            facts = [
                replace(fact, value=draw_value(random, "held-out", task.digits))
                for fact in draw_facts(random, wording_set, random.randint(*task.needles))
            ]
            if len({fact.value for fact in facts}) < len(facts):
                continue
            needles = [reader.ids(" " + state(fact, random, wording_set)) for fact in facts]
            target = random.randrange(len(facts))
            question = reader.ids(" " + ask(facts[target], facts, random, wording_set))
            if sum(map(len, needles)) + len(question) < length:
                answer = facts[target].value
                return _hide(needles, target, question, answer, length, random, hay, reader.start, depth)
        raise UserError(
            f"a prompt of {length} tokens has no room for {task.needles[0]} facts and a question; more are needed"
        )

    return make


def _haystack(reader: Reader, task: Task) -> Haystack:
    if task.haystack == BLAND:
        return Haystack(reader, reader.ids(" " + FILLER))
    if task.haystack == HARD:
        # Its facts are in the words of another set, so that none of them answers the question.
        other: WordingSet = "validation" if task.wording == "train" else "train"
        text = haystack_text(Random("hard haystack"), other, HARD_TOKENS, hard=True)
        return Haystack(reader, reader.ids(text))
    if task.haystack == TEXT:
        return Haystack(reader, encode_stream(documents(BUNDLED, "held-out"), reader.tokenizer))
    path = Path(task.haystack)
    if not path.is_file():
        raise UserError(f"the haystack is {shown(task.haystack)}; bland, hard, text or a text file is needed")
    try:
        ids = reader.ids(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise UserError(f"{path} is not text in UTF-8") from problem
    if len(ids) < LEAST_HAYSTACK:
        raise UserError(f"{path} has {len(ids)} tokens; a haystack needs at least {LEAST_HAYSTACK}")
    return Haystack(reader, ids)


def check_keys(reader: Reader, digits: int) -> None:
    """A tokenizer that loses digits of a key raises an error."""
    needle = NEEDLE.format(key="0123456789"[: min(10, digits)])
    if reader.tokenizer.decode(reader.ids(needle)).split() != needle.split():
        raise UserError(
            f"the tokenizer of {reader.name} cannot represent {needle!r}; one that keeps all digits is needed"
        )


def _hide(
    needles: Sequence[list[int]],
    target: int,
    question: list[int],
    answer: str,
    length: int,
    random: Random,
    haystack: Haystack,
    before: list[int],
    depth: float | None,
) -> Prompt:
    """Exactly `length` tokens: `before`, the needles at random depths of the haystack, and the question.

    The target, which the question asks for, is at `depth` if one is given. Needles go between sentences if a sentence
    ends nearby.
    """
    room = length - len(before) - len(question) - sum(map(len, needles))
    if room < 0:
        raise UserError(f"a prompt of {length} tokens has no room for its needle; at least {length - room} are needed")
    hay, between = haystack.draw(random, room)
    depths = [random.random() for _ in needles]
    if depth is not None:
        depths[target] = depth
    places = [_near(between, round(at * room), room) for at in depths]
    ids, used = list(before), 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda at: at[0]):
        ids += [*hay[used:place], *needle]
        used = place
    return Prompt([*ids, *hay[used:], *question], (answer,), places[target] / room if room else 0.0)


def _near(places: Sequence[int], wanted: int, room: int) -> int:
    """The place nearest to `wanted`; `wanted` itself if the nearest is more than 8 tokens and 2% of the room away."""
    at = bisect_left(places, wanted)
    nearest = min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - wanted))
    return nearest if abs(nearest - wanted) <= max(8, room // 50) else wanted


def is_right(text: str, answer: str) -> bool:
    """Whether the text begins with the answer, and no digit follows: that would be another number."""
    text = text.strip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isdigit()


def _predicts(reader: Reader, prompt: Prompt) -> bool:
    """Whether every token of the answer is the most likely one after the true tokens before it."""
    answer = reader.ids(" " + prompt.answers[0])
    ids = torch.tensor([[*prompt.ids, *answer]], device=reader.model.device)
    logits = reader.last_logits(ids, len(answer) + 1)[0, :-1]
    return logits.argmax(-1).tolist() == answer
