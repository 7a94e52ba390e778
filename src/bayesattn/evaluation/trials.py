"""Trials of a task at growing lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import torch

from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.reader import Reader

# Tokens of a batch of prompts. More are faster as long as they fit into the processor's cache.
TOKENS_AT_ONCE = 16_384

# Seconds since any fixed moment.
Clock = Callable[[], float]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, up to where the answer begins."""

    ids: list[int]
    answers: tuple[str, ...]
    depth: float = 0.0
    """Where in the haystack the answer is: 0 is the start, 1 the end."""


# Takes random numbers, a length in tokens, and a depth or None for a random one.
MakePrompt = Callable[[Random, int, "float | None"], Prompt]


class Task(Protocol):
    """How prompts are made, and how answers are scored."""

    @property
    def seed_key(self) -> str:
        """Part of every seed, so that tasks with the same seed have different random numbers."""

    @property
    def answer_tokens(self) -> int:
        """Tokens that a model may generate."""

    @property
    def counts_answer(self) -> bool:
        """Whether the length of a prompt includes room for the answer."""

    def prompts(self, reader: Reader) -> MakePrompt:
        """A function that makes prompts with the reader's tokenizer."""

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        """Let the model answer each prompt, inside of `reader.checked_model()`; scores from 0 to 1.

        `generate` and `Reader.last_logits` do so.
        """

    def settings(self) -> dict[str, Any]:
        """All settings that prompts and scores depend on."""


def generate(reader: Reader, prompts: Sequence[Prompt], tokens: int) -> list[str]:
    """Greedy continuations of the prompts, in one batch if they all have the same length."""
    if len({len(prompt.ids) for prompt in prompts}) > 1:
        return [generate(reader, [prompt], tokens)[0] for prompt in prompts]
    ids = torch.tensor([prompt.ids for prompt in prompts], device=reader.model.device)
    padding = reader.tokenizer.pad_token_id
    with reader.checked_model() as model, torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,  # this and the next override the model's own generation settings
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            pad_token_id=reader.tokenizer.eos_token_id if padding is None else padding,
            **reader.bounded_cache(),
        )
    texts: list[str] = reader.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


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
    clock: Clock = time.perf_counter,
) -> Iterator[Cell]:
    """Cells from the shortest length to the longest; each is yielded after every batch of its trials.

    Args:
        reader: the model and its tokenizer.
        task: what to ask.
        lengths: tokens of the prompts. If a model has no positions beyond, its prompts leave room for the answer.
        trials: trials of each length, one number or by length.
        seed: a trial depends on this, on its length and on its number only.
        depths: number of evenly spaced depths that the trials take in turn; None for random depths.
        budget: seconds for everything. Lengths share evenly what is left, and plan as many trials as that allows.
        done: cells to continue.
        stop: stop a length when none of its first trials is right, and skip all longer ones.
        clock: measures the budget.
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
        if not cell.trials and (note := _note_if_skipped(length, failed, most, left, per_token) or cell.note):
            yield replace(cell, note=note)
            continue
        cell = _with_note(cell, stop)
        if length in before:
            yield cell
        share = None if left is None else left / (len(ordered) - number)
        made = cell.trials
        if share is not None and 0 < made < cell.planned:
            cell = replace(cell, planned=_affordable(cell, made, wanted, share))
        longest = length if most is None or task.counts_answer else most - task.answer_tokens
        prompt_length = min(length, longest)
        while cell.trials < cell.planned and not (stop and cell.failed):
            # With a budget, the first trial alone tells how long one takes.
            size = 1 if left is not None and not cell.trials else max(1, TOKENS_AT_ONCE // length)
            batch = range(cell.trials, min(cell.planned, cell.trials + size))
            begin = clock()
            prompts = [
                make(Random(f"{seed} {task.seed_key} {length} {trial}"), prompt_length, _depth(trial, depths))
                for trial in batch
            ]
            scores = task.scores(reader, prompts)
            spent = clock() - begin
            outcomes = zip((prompt.depth for prompt in prompts), scores, strict=True)
            cell = replace(cell, outcomes=(*cell.outcomes, *outcomes), seconds=cell.seconds + spent)
            per_token = cell.seconds / cell.trials / length
            if left is not None and share is not None:
                left -= spent
                cell = replace(cell, planned=_affordable(cell, made, wanted, share))
            cell = _with_note(cell, stop)
            yield cell
        failed = length if stop and cell.failed else failed


def _note_if_skipped(length: int, failed: int, most: int | None, left: float | None, per_token: float) -> str:
    """Why a length is not to be tried; empty if it is."""
    if failed:
        return f"not tried: none right at {failed:,}"
    if most is not None and length > most:
        return f"not tried: the model has positions for {most:,} tokens"
    if left is not None and left <= 0:
        return "not tried: the time is used up"
    if left is not None and per_token * length > left:
        return f"not tried: a trial would take about {per_token * length:.0f} s"
    return ""


def _with_note(cell: Cell, stop: bool) -> Cell:
    """The cell, with a note if it has failed and stops."""
    if stop and cell.failed and 0 < cell.trials < cell.planned:
        return replace(cell, note=f"stopped: none of {cell.trials} right")
    return cell


def _affordable(cell: Cell, made: int, wanted: int, seconds: float) -> int:
    """Trials that the cell can have: `made` before, and as many more as take these seconds."""
    return max(cell.trials, min(wanted, made + int(seconds * cell.trials / max(cell.seconds, 1e-9))))


def _depth(trial: int, depths: int | None) -> float | None:
    if depths is None:
        return None
    return trial % depths / (depths - 1) if depths > 1 else 0.5


def measure(reader: Reader, task: Task, length: int, trials: int, *, seed: int = 0) -> Cell:
    """One cell with all of its trials, right or wrong."""
    *_, cell = evaluate(reader, task, [length], trials, seed=seed, stop=False)
    return cell
