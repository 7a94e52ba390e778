"""Retrieval at any length: a key hidden in a haystack, asked for at the end, answered by greedy generation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch

from bayesattn.data import retrieval
from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import BUNDLED, Split, documents
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt, generate
from bayesattn.files import content_of

# Tokens of a hard haystack; a longer one repeats it.
HARD_TOKENS = 65_536
LEAST_HAYSTACK = 100
# Of shorter keys there are too few that are not of training.
LEAST_DIGITS = 3
BLAND, HARD, TEXT = "bland", "hard", "text"
# What a sentence ends with; a line is one too.
ENDINGS = (".", "!", "?", "\n", "。", "！", "？")


@dataclass(frozen=True)
class Task:
    """What is asked.

    Args:
        wording: `standard`, the usual pass-key prompt; or `train`, `held-out` or `fresh`: several facts in those
            wordings, which compete.
        haystack: `bland` (the usual sentences), `hard` (facts about others, bare numbers, loose words), `text`
            (held-out documents of the bundled text) or a text file. By default bland for the standard wording, text
            for the others.
        needles: least and most facts that compete; the standard wording has one.
        digits: of each key. Keys are never among those of training.
        teacher_forced: whether each digit is predicted after the true ones, instead of after those the model said.
    """

    wording: Literal["standard", "train", "held-out", "fresh"] = "standard"
    haystack: str = ""
    needles: tuple[int, int] = (3, 5)
    digits: int = 5
    teacher_forced: bool = False

    def __post_init__(self) -> None:
        if self.wording not in ("standard", *retrieval.WORDINGS):
            raise UserError(f"the wording is {self.wording!r}; standard, train, held-out and fresh are allowed")
        if not 1 <= self.needles[0] <= self.needles[1] <= 20:
            raise UserError(f"{self.needles[0]} to {self.needles[1]} keys are asked for; 1 to 20 are allowed")
        if not LEAST_DIGITS <= self.digits <= 50:
            raise UserError(f"keys of {self.digits} digits are asked for; {LEAST_DIGITS} to 50 are allowed")
        if not self.haystack:
            object.__setattr__(self, "haystack", BLAND if self.wording == "standard" else TEXT)

    @property
    def kind(self) -> str:
        return "passkey"

    @property
    def seeded(self) -> str:
        return self.wording

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
        _check_keys(reader, self)
        if self.wording == "standard":
            return _standard(reader, self, hay)
        return _competing(reader, self, hay, self.wording)

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        """1 if all digits are right, nothing comes before them, and no other digit after."""
        if self.teacher_forced:
            return [float(_predicts(reader, prompt)) for prompt in prompts]
        said = generate(reader, prompts, self.answer_tokens)
        return [float(is_right(text, prompt.answers[0])) for text, prompt in zip(said, prompts, strict=True)]


class Haystack:
    """Text of any length, around the end if need be: from anywhere up to the end of a sentence."""

    def __init__(self, reader: Reader, ids: Sequence[int] | Tokens) -> None:
        self.ids = np.asarray(ids, dtype=np.int32)
        closing = [
            int(i) for i in np.unique(self.ids) if reader.tokenizer.decode([int(i)]).rstrip(" ").endswith(ENDINGS)
        ]
        self.closes = np.isin(self.ids, closing)
        if not self.closes.any():  # no sentences: anywhere is as good
            self.closes[:] = True

    def draw(self, random: Random, room: int) -> tuple[list[int], list[int]]:
        """So many tokens, and the places between its sentences, from 0 to `room`."""
        end = int(random.choice(np.flatnonzero(self.closes))) + 1
        where = np.arange(end - room, end) % len(self.ids)
        return self.ids[where].tolist(), [0, *(np.flatnonzero(self.closes[where]) + 1).tolist()]


def _standard(reader: Reader, task: Task, hay: Haystack) -> MakePrompt:
    """The usual pass-key prompt. Neither it nor its bland filler is in the training data."""
    intro, question = reader.ids(retrieval.PASSKEY_INTRO), reader.ids(" " + retrieval.PASSKEY_QUESTION)

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        key = retrieval.draw_value(random, "held-out", task.digits)
        needle = reader.ids(" " + retrieval.PASSKEY_NEEDLE.format(key=key))
        return _hide([needle], 0, question, key, length, random, hay, [*reader.start, *intro], depth)

    return make


def _competing(reader: Reader, task: Task, hay: Haystack, worded: retrieval.Worded) -> MakePrompt:
    """One of several facts that are easily confused, so worded; values held out."""

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        for _ in range(1000):  # fewer and shorter facts are drawn more often where there is little room
            facts = [
                replace(fact, value=retrieval.draw_value(random, "held-out", task.digits))
                for fact in retrieval.draw_facts(random, worded, random.randint(*task.needles))
            ]
            if len({fact.value for fact in facts}) < len(facts):
                continue
            stated = [reader.ids(" " + retrieval.state(fact, random, worded)) for fact in facts]
            asked = random.randrange(len(facts))
            question = reader.ids(" " + retrieval.ask(facts[asked], facts, random, worded))
            if sum(map(len, stated)) + len(question) < length:
                answer = facts[asked].value
                return _hide(stated, asked, question, answer, length, random, hay, reader.start, depth)
        raise UserError(
            f"a prompt of {length} tokens has no room for {task.needles[0]} facts and a question; make it longer"
        )

    return make


def _haystack(reader: Reader, task: Task) -> Haystack:
    if task.haystack == BLAND:
        return Haystack(reader, reader.ids(" " + retrieval.PASSKEY_FILLER))
    if task.haystack == HARD:
        # Facts worded as the other split's are about other things than what is asked.
        split: Split = "held-out" if task.wording == "train" else "train"
        text = retrieval.haystack_text(Random("hard haystack"), split, HARD_TOKENS, hard=True)
        return Haystack(reader, reader.ids(text))
    if task.haystack == TEXT:
        return Haystack(reader, encode_stream(documents(BUNDLED, "held-out"), reader.tokenizer))
    path = Path(task.haystack)
    if not path.is_file():
        raise UserError(f"the haystack is {task.haystack!r}; bland, hard, text or a text file is needed")
    try:
        ids = reader.ids(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise UserError(f"{path} is not text in UTF-8") from problem
    if len(ids) < LEAST_HAYSTACK:
        raise UserError(f"{path} has {len(ids)} tokens; a haystack needs at least {LEAST_HAYSTACK}")
    return Haystack(reader, ids)


def _check_keys(reader: Reader, task: Task) -> None:
    needle = retrieval.PASSKEY_NEEDLE.format(key="0123456789"[: min(10, task.digits)])
    if reader.tokenizer.decode(reader.ids(needle)).split() != needle.split():
        raise UserError(f"the tokenizer of {reader.name} cannot represent {needle!r}; its keys could not be told apart")


def _hide(
    needles: Sequence[list[int]],
    asked: int,
    question: list[int],
    answer: str,
    length: int,
    random: Random,
    haystack: Haystack,
    before: list[int],
    depth: float | None,
) -> Prompt:
    """Exactly `length` tokens: `before`, the needles at random depths of the haystack, and the question.

    The needle that is asked for is at `depth` if one is given. Needles are put between sentences if one ends nearby.
    """
    room = length - len(before) - len(question) - sum(map(len, needles))
    if room < 0:
        raise UserError(f"a prompt of {length} tokens has no room for its needle; at least {length - room} are needed")
    hay, between = haystack.draw(random, room)
    depths = [random.random() for _ in needles]
    if depth is not None:
        depths[asked] = depth
    places = [_near(between, round(at * room), room) for at in depths]
    ids, done = list(before), 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda at: at[0]):
        ids += [*hay[done:place], *needle]
        done = place
    return Prompt([*ids, *hay[done:], *question], (answer,), places[asked] / room if room else 0.0)


def _near(places: Sequence[int], wanted: int, room: int) -> int:
    """The place nearest to the wanted one, or that itself if the depth would change by more than 2% and 8 tokens."""
    at = bisect_left(places, wanted)
    nearest = min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - wanted))
    return nearest if abs(nearest - wanted) <= max(8, room // 50) else wanted


def is_right(said: str, answer: str) -> bool:
    """Whether the answer comes first, and ends where it should: another digit after it would be another number."""
    said = said.strip()
    return said.startswith(answer) and not said[len(answer) : len(answer) + 1].isdigit()


def _predicts(reader: Reader, prompt: Prompt) -> bool:
    """Whether every token of the answer is the most likely one after the true ones before it."""
    answer = reader.ids(" " + prompt.answers[0])
    ids = torch.tensor([[*prompt.ids, *answer]], device=reader.model.device)
    logits = reader.last_logits(ids, len(answer) + 1)[0, :-1]
    return logits.argmax(-1).tolist() == answer
