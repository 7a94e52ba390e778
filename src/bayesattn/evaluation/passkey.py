"""Retrieval at any length: a key hidden in a haystack, asked for at the end, answered by greedy generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from bayesattn.evaluation.intervals import wilson
from bayesattn.evaluation.reader import Reader
from bayesattn.files import read_results, write_results

# Tokens read at the same time by the sequences of a batch; more is faster up to the size of the cache.
TOKENS_AT_ONCE = 16_384
# A cell none of whose first so many trials is right goes no further, and longer ones are not tried.
FAILED_AFTER = 20
# Tokens of a hard haystack; a longer one repeats it.
HARD_TOKENS = 65_536
LEAST_HAYSTACK = 100
KIND = "passkey"
BLAND, HARD, TEXT = "bland", "hard", "text"


@dataclass(frozen=True)
class Prompt:
    """Tokens that end just before the answer, and how deep the answer is hidden: 0 at the start, 1 at the end."""

    ids: list[int]
    answer: str
    depth: float = 0.0


@dataclass(frozen=True)
class Task:
    """What is asked.

    Args:
        wording: `standard`, the usual pass-key prompt; or `train` or `held-out`: facts in the wordings of that split,
            several of which compete.
        haystack: `bland` (the usual sentences), `hard` (facts about others, bare numbers, loose words), `text`
            (held-out documents of the bundled text) or a text file. By default bland for the standard wording, text
            for the others.
        needles: least and most facts that compete; the standard wording has one.
        digits: of each key. Keys are never among those of training.
        teacher_forced: whether each digit is predicted after the true ones, instead of after those the model said.
    """

    wording: Literal["standard", "train", "held-out"] = "standard"
    haystack: str = ""
    needles: tuple[int, int] = (3, 5)
    digits: int = 5
    teacher_forced: bool = False

    def __post_init__(self) -> None:
        if self.wording not in ("standard", "train", "held-out"):
            raise UserError(f"the wording is {self.wording!r}; standard, train and held-out are allowed")
        if not 1 <= self.needles[0] <= self.needles[1] <= 20:
            raise UserError(f"{self.needles[0]} to {self.needles[1]} keys are asked for; 1 to 20 are allowed")
        if not 1 <= self.digits <= 50:
            raise UserError(f"keys of {self.digits} digits are asked for; 1 to 50 are allowed")
        if not self.haystack:
            object.__setattr__(self, "haystack", BLAND if self.wording == "standard" else TEXT)


@dataclass(frozen=True)
class Cell:
    """How often the whole answer was right at one length: depth and verdict of each trial."""

    length: int
    outcomes: tuple[tuple[float, bool], ...] = ()
    seconds: float = 0.0
    planned: int = 0
    note: str = ""

    @property
    def trials(self) -> int:
        return len(self.outcomes)

    @property
    def right(self) -> int:
        return sum(right for _, right in self.outcomes)

    @property
    def accuracy(self) -> float | None:
        return self.right / self.trials if self.trials else None

    @property
    def failed(self) -> bool:
        return bool(self.note) or (self.right == 0 and self.trials >= min(FAILED_AFTER, self.planned))

    def __str__(self) -> str:
        if self.accuracy is None:
            return self.note or "not tried"
        low, high = wilson(self.right, self.trials)
        return f"{self.accuracy:.0%} ({self.right}/{self.trials}, 95% interval {low:.0%} … {high:.0%})"

    def to_dict(self) -> dict[str, Any]:
        low, high = wilson(self.right, self.trials)
        return {
            "length": self.length,
            "trials": self.trials,
            "correct": self.right,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "seconds": round(self.seconds, 3),
            "planned": self.planned,
            "note": self.note,
            "outcomes": [[round(depth, 4), int(right)] for depth, right in self.outcomes],
        }

    @classmethod
    def from_dict(cls, cell: Mapping[str, Any]) -> Cell:
        outcomes = tuple((float(depth), bool(right)) for depth, right in cell["outcomes"])
        return cls(cell["length"], outcomes, cell["seconds"], cell["planned"], cell["note"])


MakePrompt = Callable[[Random, int, "float | None"], Prompt]
Haystack = Callable[[Random, int], list[int]]


def prompts(reader: Reader, task: Task) -> MakePrompt:
    """A function of random numbers, a length and a depth (None for any) that makes prompts of exactly that length."""
    hay = _haystack(reader, task)
    _check_keys(reader, task)
    if task.wording == "standard":
        return _standard(reader, task, hay)
    return _competing(reader, task, hay, task.wording)


def _standard(reader: Reader, task: Task, hay: Haystack) -> MakePrompt:
    """The usual pass-key prompt. Neither it nor its bland filler is in the training data."""
    intro, question = reader.ids(retrieval.PASSKEY_INTRO), reader.ids(" " + retrieval.PASSKEY_QUESTION)

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        key = retrieval.draw_value(random, "held-out", task.digits)
        needle = reader.ids(" " + retrieval.PASSKEY_NEEDLE.format(key=key))
        return _hide([needle], 0, question, key, length, random, hay, [*reader.start, *intro], depth)

    return make


def _competing(reader: Reader, task: Task, hay: Haystack, split: Split) -> MakePrompt:
    """One of several facts that are easily confused; wordings of the split, values held out."""

    def make(random: Random, length: int, depth: float | None) -> Prompt:
        for _ in range(1000):  # fewer and shorter facts are drawn more often where there is little room
            facts = [
                replace(fact, value=retrieval.draw_value(random, "held-out", task.digits))
                for fact in retrieval.draw_facts(random, split, random.randint(*task.needles))
            ]
            stated = [reader.ids(" " + retrieval.state(fact, random, split)) for fact in facts]
            asked = random.randrange(len(facts))
            question = reader.ids(" " + retrieval.ask(facts[asked], facts, random, split))
            if sum(map(len, stated)) + len(question) < length:
                answer = facts[asked].value
                return _hide(stated, asked, question, answer, length, random, hay, reader.start, depth)
        raise UserError(
            f"a prompt of {length} tokens has no room for {task.needles[0]} facts and a question; make it longer"
        )

    return make


def _haystack(reader: Reader, task: Task) -> Haystack:
    if task.haystack == BLAND:
        return _repeated(reader.ids(" " + retrieval.PASSKEY_FILLER))
    if task.haystack == HARD:
        # Facts worded as the other split's are about other things than what is asked.
        split: Split = "held-out" if task.wording == "train" else "train"
        text = retrieval.haystack_text(Random("hard haystack"), split, HARD_TOKENS, hard=True)
        return _anywhere(np.asarray(reader.ids(text), dtype=np.int32))
    if task.haystack == TEXT:
        return _anywhere(encode_stream(documents(BUNDLED, "held-out"), reader.tokenizer))
    path = Path(task.haystack)
    if not path.is_file():
        raise UserError(f"the haystack is {task.haystack!r}; bland, hard, text or a text file is needed")
    try:
        ids = reader.ids(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise UserError(f"{path} is not text in UTF-8") from problem
    if len(ids) < LEAST_HAYSTACK:
        raise UserError(f"{path} has {len(ids)} tokens; a haystack needs at least {LEAST_HAYSTACK}")
    return _anywhere(np.asarray(ids, dtype=np.int32))


def _repeated(filler: list[int]) -> Haystack:
    return lambda random, room: (filler * (room // len(filler) + 1))[:room]


def _anywhere(stream: Tokens) -> Haystack:
    """From a random place on, around the end if need be."""

    def text(random: Random, room: int) -> list[int]:
        start = random.randrange(len(stream))
        return np.take(stream, range(start, start + room), mode="wrap").tolist()

    return text


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

    The needle that is asked for is at `depth` if one is given.
    """
    room = length - len(before) - len(question) - sum(map(len, needles))
    if room < 0:
        raise UserError(f"a prompt of {length} tokens has no room for its needle; at least {length - room} are needed")
    hay = haystack(random, room)
    places = [random.randint(0, room) for _ in needles]
    if depth is not None:
        places[asked] = round(depth * room)
    ids, done = list(before), 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda at: at[0]):
        ids += [*hay[done:place], *needle]
        done = place
    return Prompt([*ids, *hay[done:], *question], answer, places[asked] / room if room else 0.0)


def verdicts(reader: Reader, asked: Sequence[Prompt], teacher_forced: bool = False) -> list[bool]:
    """Whether the model answers each prompt right; all are of the same length and read together."""
    with torch.inference_mode():
        if teacher_forced:
            return [_predicts(reader, prompt) for prompt in asked]
        ids = torch.tensor([prompt.ids for prompt in asked], device=reader.model.device)
        out = reader.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(len(prompt.answer) for prompt in asked) + 3,
            do_sample=False,
            pad_token_id=_padding(reader.tokenizer),
        )
    said = reader.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return [is_right(text, prompt.answer) for text, prompt in zip(said, asked, strict=True)]


def _padding(tokenizer: Any) -> int | None:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def is_right(said: str, answer: str) -> bool:
    """Whether the answer comes first, and ends where it should: another digit after it would be another number."""
    said = said.strip()
    return said.startswith(answer) and not said[len(answer) : len(answer) + 1].isdigit()


def _predicts(reader: Reader, prompt: Prompt) -> bool:
    """Whether every token of the answer is the most likely one after the true ones before it."""
    answer = reader.ids(" " + prompt.answer)
    ids = torch.tensor([[*prompt.ids, *answer]], device=reader.model.device)
    logits = reader.model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, -len(answer) - 1 : -1]
    return logits.argmax(-1).tolist() == answer


def evaluate(
    reader: Reader,
    task: Task,
    lengths: Sequence[int],
    trials: int | Mapping[int, int],
    *,
    seed: int = 0,
    depths: int | None = None,
    budget: float | None = None,
    done: Sequence[Cell] = (),
    stop: bool = True,
) -> Iterator[Cell]:
    """Cells from the shortest length to the longest, each as it is after every batch of trials.

    Args:
        reader, task: who is asked what.
        lengths: tokens of the prompts.
        trials: of each length, or by length; what they are depends on the seed, the length and their number alone.
        depths: evenly spaced depths that the trials take in turn; None for random ones.
        budget: seconds for everything; lengths then share what is left evenly and have as many trials as that allows.
        done: cells to go on from.
        stop: whether a cell ends when none of its first trials is right, and longer ones are not tried.
    """
    for length in lengths:
        reader.check_length(length)
    make = prompts(reader, task)
    before = {cell.length: cell for cell in done}
    left = None if budget is None else budget - sum(cell.seconds for cell in done)
    failed, per_token = 0, 0.0
    ordered = sorted(set(lengths))
    for number, length in enumerate(ordered):
        wanted = trials if isinstance(trials, int) else trials[length]
        cell = before.get(length, Cell(length, planned=wanted))
        most = reader.most_positions
        if failed and not cell.trials:
            cell = replace(cell, note=f"not tried: none right at {failed:,}")
        elif most is not None and length > most:
            cell = replace(cell, note=f"not tried: the model has positions for {most:,} tokens")
        elif left is not None and not cell.trials and per_token * length > left:
            cell = replace(cell, note=f"not tried: a trial would take about {per_token * length:.0f} s")
        if cell.note and not cell.trials:
            yield cell
            continue
        if length in before:
            yield cell
        share = None if left is None else left / (len(ordered) - number)
        while cell.trials < cell.planned and not (stop and cell.failed):
            batch = range(cell.trials, min(cell.planned, cell.trials + max(1, TOKENS_AT_ONCE // length)))
            asked = [
                make(Random(f"{seed} {task.wording} {length} {trial}"), length, _depth(trial, depths))
                for trial in batch
            ]
            begin = time.perf_counter()
            right = verdicts(reader, asked, task.teacher_forced)
            spent = time.perf_counter() - begin
            outcomes = zip((prompt.depth for prompt in asked), right, strict=True)
            cell = replace(cell, outcomes=(*cell.outcomes, *outcomes), seconds=cell.seconds + spent)
            per_token = cell.seconds / cell.trials / length
            if left is not None and share is not None:
                left -= spent
                cell = replace(cell, planned=max(cell.trials, min(wanted, int(share / (per_token * length)))))
            if stop and cell.failed and cell.trials < cell.planned:
                cell = replace(cell, note=f"stopped: none of {cell.trials} right")
            yield cell
        failed = length if stop and cell.failed else failed


def _depth(trial: int, depths: int | None) -> float | None:
    if depths is None:
        return None
    return trial % depths / (depths - 1) if depths > 1 else 0.5


def measure(reader: Reader, task: Task, length: int, trials: int, *, seed: int = 0) -> Cell:
    """One cell, all of its trials."""
    *_, cell = evaluate(reader, task, [length], trials, seed=seed, stop=False)
    return cell


def run(
    reader: Reader,
    task: Task,
    lengths: Sequence[int],
    trials: int,
    file: Path,
    *,
    seed: int = 0,
    depths: int | None = None,
    budget: float | None = None,
    stop: bool = True,
    command: str = "",
) -> Iterator[list[Cell]]:
    """`evaluate`, kept in a file after every batch; what the file has of the same evaluation is not done again.

    More lengths or trials may be asked for than the first time. Another model, task or seed is refused.
    """
    extent = {"trials": trials, "budget": budget, "stop": stop}
    known: dict[str, Any] = {
        "model": reader.name,
        "fingerprint": reader.fingerprint,
        "train_length": reader.train_length,
        "settings": {**asdict(task), "needles": list(task.needles), "seed": seed, "depths": depths},
    }
    cells: dict[int, Cell] = {}
    if file.exists():
        content = read_results(file, KIND)
        before, now = ({**part, **part["settings"]} for part in (content, known))
        if differing := sorted(key for key in now if key != "settings" and before.get(key) != now[key]):
            raise UserError(f"{file} holds another evaluation ({', '.join(differing)} differ); choose another file")
        cells = {cell["length"]: Cell.from_dict(cell) for cell in content["cells"]}
        if content["extent"] != extent:
            cells = {
                length: replace(cell, planned=max(trials, cell.trials), note="")
                for length, cell in cells.items()
                if cell.trials
            }
    for cell in evaluate(
        reader, task, lengths, trials, seed=seed, depths=depths, budget=budget, done=list(cells.values()), stop=stop
    ):
        cells[cell.length] = cell
        ordered = [cells[length] for length in sorted(cells)]
        write_results(
            file, KIND, {**known, "extent": extent, "command": command, "cells": [c.to_dict() for c in ordered]}
        )
        yield ordered
