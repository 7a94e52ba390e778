"""Trials of a task at growing lengths, kept in a file as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import wilson
from bayesattn.evaluation.reader import Reader
from bayesattn.files import joined_commands, read_results, write_results

# Tokens read at the same time by the sequences of a batch; more is faster up to the size of the cache.
TOKENS_AT_ONCE = 16_384
# A cell none of whose first so many trials is right goes no further, and longer ones are not tried; where there are
# fewer in all it takes all of them, and no less than the second number.
FAILED_AFTER, LEAST_FAILED = 20, 5


@dataclass(frozen=True)
class Prompt:
    """Tokens that end just before the answers, and how deep what is asked for is hidden: 0 is the start, 1 the end."""

    ids: list[int]
    answers: tuple[str, ...]
    depth: float = 0.0


@dataclass(frozen=True)
class Cell:
    """The trials at one length: depth and score of each."""

    length: int
    outcomes: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0
    planned: int = 0
    note: str = ""

    @property
    def trials(self) -> int:
        return len(self.outcomes)

    @property
    def right(self) -> float:
        """The sum of scores: how many were right, if none was right in part."""
        total = sum(score for _, score in self.outcomes)
        return int(total) if total == int(total) else total

    @property
    def accuracy(self) -> float | None:
        return self.right / self.trials if self.trials else None

    @property
    def failed(self) -> bool:
        enough = max(LEAST_FAILED, min(FAILED_AFTER, self.planned))
        return bool(self.note) or (self.right == 0 and self.trials >= enough)

    def __str__(self) -> str:
        if self.accuracy is None:
            return self.note or "not tried"
        low, high = wilson(self.right, self.trials)
        return f"{self.accuracy:.0%} ({self.right:g}/{self.trials}, 95% interval {low:.0%} … {high:.0%})"

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
            "outcomes": [[round(depth, 4), round(score, 4)] for depth, score in self.outcomes],
        }

    @classmethod
    def from_dict(cls, cell: Mapping[str, Any]) -> Cell:
        outcomes = tuple((float(depth), float(score)) for depth, score in cell["outcomes"])
        return cls(cell["length"], outcomes, cell["seconds"], cell["planned"], cell["note"])


# Random numbers, a length in tokens, and a depth or None for any.
MakePrompt = Callable[[Random, int, "float | None"], Prompt]


class Task(Protocol):
    """What is asked, and how answers are judged."""

    @property
    def kind(self) -> str:
        """Of the result files."""

    @property
    def seeded(self) -> str:
        """What sets the random numbers of this task apart from those of others with the same seed."""

    @property
    def answer_tokens(self) -> int:
        """How many a model may say."""

    @property
    def counts_answer(self) -> bool:
        """Whether the answer is part of the length that a prompt is asked to have."""

    def prompts(self, reader: Reader) -> MakePrompt:
        """What makes prompts in the tokens of a reader."""

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        """0 to 1 for the answer to each."""

    def settings(self) -> dict[str, Any]:
        """All that prompts and scores depend on."""


def generate(reader: Reader, prompts: Sequence[Prompt], tokens: int) -> list[str]:
    """What the model says next, greedily; prompts of the same length are read together."""
    if len({len(prompt.ids) for prompt in prompts}) > 1:
        return [generate(reader, [prompt], tokens)[0] for prompt in prompts]
    ids = torch.tensor([prompt.ids for prompt in prompts], device=reader.model.device)
    padding = reader.tokenizer.pad_token_id
    with torch.inference_mode():
        out = reader.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,  # whatever the model's folder says of how to generate
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            pad_token_id=reader.tokenizer.eos_token_id if padding is None else padding,
        )
    said: list[str] = reader.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return said


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
        lengths: tokens of the prompts; where a model has no more positions, its answer is taken off.
        trials: of each length, or by length; what they are depends on the seed, the length and their number alone.
        depths: evenly spaced depths that the trials take in turn; None for random ones.
        budget: seconds for everything; lengths then share what is left evenly and have as many trials as that allows.
        done: cells to go on from.
        stop: whether a cell ends when none of its first trials is right, and longer ones are not tried.
    """
    most = reader.most_positions
    for length in lengths:
        if most is None or length <= most:
            reader.check_length(length)
    make = task.prompts(reader)
    before = {cell.length: cell for cell in done}
    left = None if budget is None else budget - sum(cell.seconds for cell in done)
    failed, per_token = 0, 0.0
    ordered = sorted(set(lengths))
    for number, length in enumerate(ordered):
        wanted = trials if isinstance(trials, int) else trials[length]
        cell = before.get(length, Cell(length, planned=wanted))
        per_token = cell.seconds / cell.trials / length if cell.trials else per_token
        if failed and not cell.trials:
            cell = replace(cell, note=f"not tried: none right at {failed:,}")
        elif most is not None and length > most:
            cell = replace(cell, note=f"not tried: the model has positions for {most:,} tokens")
        elif left is not None and not cell.trials and left <= 0:
            cell = replace(cell, note="not tried: the time is used up")
        elif left is not None and not cell.trials and per_token * length > left:
            cell = replace(cell, note=f"not tried: a trial would take about {per_token * length:.0f} s")
        if cell.note and not cell.trials:
            yield cell
            continue
        cell = _noted(cell, stop)
        if length in before:
            yield cell
        share = None if left is None else left / (len(ordered) - number)
        made = cell.trials
        if share is not None and 0 < made < cell.planned:
            cell = replace(cell, planned=_affordable(cell, made, wanted, share))
        longest = length if most is None or task.counts_answer else most - task.answer_tokens
        prompt_length = min(length, longest)
        while cell.trials < cell.planned and not (stop and cell.failed):
            # Within a time, the first tells how long one takes.
            together = 1 if left is not None and not cell.trials else max(1, TOKENS_AT_ONCE // length)
            batch = range(cell.trials, min(cell.planned, cell.trials + together))
            begin = time.perf_counter()
            asked = [
                make(Random(f"{seed} {task.seeded} {length} {trial}"), prompt_length, _depth(trial, depths))
                for trial in batch
            ]
            scores = task.scores(reader, asked)
            spent = time.perf_counter() - begin
            outcomes = zip((prompt.depth for prompt in asked), scores, strict=True)
            cell = replace(cell, outcomes=(*cell.outcomes, *outcomes), seconds=cell.seconds + spent)
            per_token = cell.seconds / cell.trials / length
            if left is not None and share is not None:
                left -= spent
                cell = replace(cell, planned=_affordable(cell, made, wanted, share))
            cell = _noted(cell, stop)
            yield cell
        failed = length if stop and cell.failed else failed


def _noted(cell: Cell, stop: bool) -> Cell:
    """With a note if it goes no further."""
    if stop and cell.failed and 0 < cell.trials < cell.planned:
        return replace(cell, note=f"stopped: none of {cell.trials} right")
    return cell


def _affordable(cell: Cell, made: int, wanted: int, seconds: float) -> int:
    """Trials of a cell in all, if `made` of them were there already and so many seconds are for the others."""
    return max(cell.trials, min(wanted, made + int(seconds * cell.trials / max(cell.seconds, 1e-9))))


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
        "settings": {**task.settings(), "seed": seed, "depths": depths},
    }
    cells: dict[int, Cell] = {}
    content: dict[str, Any] = {}
    if file.exists():
        content = read_results(file, task.kind)
        before, now = ({**part, **part["settings"]} for part in (content, known))
        if differing := sorted(key for key in now if key != "settings" and before.get(key) != now[key]):
            raise UserError(f"{file} holds another evaluation, with other {', '.join(differing)}; choose another file")
        cells = {cell["length"]: Cell.from_dict(cell) for cell in content["cells"]}
        if content.get("extent") != extent:
            cells = {
                length: replace(cell, planned=max(trials, cell.trials), note="")
                for length, cell in cells.items()
                if cell.trials
            }
    told = joined_commands(content.get("command", ""), command)
    for cell in evaluate(
        reader, task, lengths, trials, seed=seed, depths=depths, budget=budget, done=list(cells.values()), stop=stop
    ):
        cells[cell.length] = cell
        ordered = [cells[length] for length in sorted(cells)]
        write_results(
            file,
            task.kind,
            {**content, **known, "extent": extent, "command": told, "cells": [c.to_dict() for c in ordered]},
        )
        yield ordered
