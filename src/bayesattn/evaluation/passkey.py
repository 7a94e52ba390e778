"""Retrieval at any length: a key hidden in a haystack, asked for at the end, answered by greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from bayesattn.data import retrieval
from bayesattn.data.contexts import Tokens
from bayesattn.data.text import Split
from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import wilson

# Tokens read at the same time by the sequences of a batch; more is faster up to the size of the cache.
TOKENS_AT_ONCE = 16_384


@dataclass(frozen=True)
class Prompt:
    """Tokens that end just before the answer."""

    ids: list[int]
    answer: str


@dataclass(frozen=True)
class Cell:
    """How often the whole answer was right."""

    task: str
    length: int
    right: int
    trials: int

    @property
    def accuracy(self) -> float:
        return self.right / self.trials if self.trials else float("nan")

    def __str__(self) -> str:
        low, high = wilson(self.right, self.trials)
        return f"{self.accuracy:.0%} ({self.right}/{self.trials}, 95% interval {low:.0%} … {high:.0%})"


MakePrompt = Callable[[Random, int], Prompt]


def standard(tokenizer: Any, digits: int = 5) -> MakePrompt:
    """The usual pass-key prompt in its bland filler, at a random depth. Neither is in the training data."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    intro, filler, question = (
        ids(text)
        for text in (retrieval.PASSKEY_INTRO, " " + retrieval.PASSKEY_FILLER, " " + retrieval.PASSKEY_QUESTION)
    )

    def make(random: Random, length: int) -> Prompt:
        key = retrieval.draw_value(random, "held-out", digits)
        needle = ids(" " + retrieval.PASSKEY_NEEDLE.format(key=key))
        return _hide([needle], question, key, length, random, _repeat(filler), before=[tokenizer.bos_token_id, *intro])

    return make


def competing(
    tokenizer: Any, haystack: Tokens, split: Split, *, needles: tuple[int, int] = (3, 5), digits: int = 5
) -> MakePrompt:
    """One of several facts that are easily confused, in real text; wordings of the split, values held out."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def text(random: Random, room: int) -> list[int]:
        start = random.randrange(len(haystack))
        return np.take(haystack, range(start, start + room), mode="wrap").tolist()

    def make(random: Random, length: int) -> Prompt:
        for _ in range(1000):  # fewer and shorter facts are drawn more often where there is little room
            number = random.randint(*needles)
            facts = [
                retrieval.Fact(fact.entity, fact.attribute, retrieval.draw_value(random, "held-out", digits))
                for fact in retrieval.draw_facts(random, split, number)
            ]
            stated = [ids(" " + retrieval.state(fact, random, split)) for fact in facts]
            asked = random.choice(facts)
            question = ids(" " + retrieval.ask(asked, facts, random, split))
            if sum(map(len, stated)) + len(question) < length:
                return _hide(stated, question, asked.value, length, random, text, before=[tokenizer.bos_token_id])
        raise UserError(
            f"a prompt of {length} tokens has no room for {needles[0]} facts and a question; make it longer"
        )

    return make


def _repeat(filler: list[int]) -> Callable[[Random, int], list[int]]:
    return lambda random, room: (filler * (room // len(filler) + 1))[:room]


def _hide(
    needles: Sequence[list[int]],
    question: list[int],
    answer: str,
    length: int,
    random: Random,
    haystack: Callable[[Random, int], list[int]],
    before: list[int],
) -> Prompt:
    """Exactly `length` tokens: `before`, the needles at random depths of the haystack, and the question."""
    room = length - len(before) - len(question) - sum(map(len, needles))
    if room < 0:
        raise UserError(f"a prompt of {length} tokens has no room for its needle; at least {length - room} are needed")
    hay = haystack(random, room)
    places = sorted(random.randint(0, room) for _ in needles)
    ids, done = list(before), 0
    for place, needle in zip(places, needles, strict=True):
        ids += [*hay[done:place], *needle]
        done = place
    return Prompt([*ids, *hay[done:], *question], answer)


def answers(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[str]:
    """What the model says next, greedily, a few tokens more than the longest answer has."""
    longest = max(len(prompt.answer) for prompt in prompts) + 3
    batch = max(1, TOKENS_AT_ONCE // len(prompts[0].ids))
    said: list[str] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), batch):
            ids = torch.tensor([prompt.ids for prompt in prompts[start : start + batch]], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            said += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return said


def is_right(said: str, answer: str) -> bool:
    """Whether the answer comes first, and ends where it should: another digit after it would be another number."""
    said = said.strip()
    return said.startswith(answer) and not said[len(answer) : len(answer) + 1].isdigit()


def measure(
    model: Any, tokenizer: Any, make: MakePrompt, length: int, trials: int, *, seed: int = 0, task: str = "passkey"
) -> Cell:
    """The share of `trials` prompts of `length` tokens that are answered right."""
    prompts = [make(Random(f"{seed} {task} {length} {trial}"), length) for trial in range(trials)]
    said = answers(model, tokenizer, prompts)
    right = sum(is_right(text, prompt.answer) for text, prompt in zip(said, prompts, strict=True))
    return Cell(task, length, right, trials)
