"""Trials: budgets and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt, evaluate


class AnyLength(Reader):
    most_positions = None

    def check_length(self, length: int) -> None:
        pass


READER = AnyLength("anything", None, None, 128, "weights")


@dataclass
class Coins:
    """A task whose answers are right or wrong by chance; `before` is called before each batch."""

    before: Callable[[Sequence[Prompt]], object] = lambda prompts: None
    chance: float = 0.7
    seed_key: str = field(default="coins", init=False)
    answer_tokens: int = field(default=1, init=False)
    counts_answer: bool = field(default=False, init=False)

    def prompts(self, reader: Reader) -> MakePrompt:
        return lambda random, length, depth: Prompt([random.randrange(100)] * length, ("",), random.random())

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        self.before(prompts)
        return [float(prompt.ids[0] < 100 * self.chance) for prompt in prompts]

    def settings(self) -> dict[str, Any]:
        return {"task": "coins"}


@dataclass
class Ticks:
    """A clock that stands still, except that each token of a prompt takes a millisecond."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def read(self, prompts: Sequence[Prompt]) -> None:
        self.seconds += sum(len(prompt.ids) for prompt in prompts) / 1000


def evaluate_with(budget: float, lengths: Sequence[int], done: Sequence[Cell] = ()) -> dict[int, Cell]:
    clock = Ticks()
    cells = evaluate(READER, Coins(clock.read, chance=1.0), lengths, 100, budget=budget, done=done, clock=clock)
    return {cell.length: cell for cell in cells}


def test_a_budget_is_shared_by_the_lengths() -> None:
    cells = evaluate_with(200.0, [1000, 10_000, 50_000])  # a trial takes a second, ten and fifty
    assert [cell.trials for cell in cells.values()] == [66, 6, 1]
    assert sum(cell.seconds for cell in cells.values()) <= 200


def test_a_trial_beyond_the_budget_is_not_tried() -> None:
    assert evaluate_with(50.0, [1000, 10**6])[10**6].note == "not tried: a trial would take about 1000 s"


def test_a_budget_counts_what_was_spent_before_an_interruption() -> None:
    half = [Cell(1000, ((0.5, 1.0),) * 33, 33.0, 66)]
    cells = evaluate_with(99.0, [1000, 50_000], half)
    assert [cell.trials for cell in cells.values()] == [66, 0]
    assert cells[50_000].note == "not tried: a trial would take about 50 s"
    assert evaluate_with(30.0, [1000, 2000], half)[2000].note == "not tried: the time is used up"


@pytest.mark.parametrize(("planned", "tried"), [(100, 24), (12, 12), (3, 3)])
def test_a_length_without_a_right_answer_stops_and_longer_ones_are_skipped(planned: int, tried: int) -> None:
    cells = {cell.length: cell for cell in evaluate(READER, Coins(chance=0.0), [2048, 4096], planned)}
    assert cells[2048].trials == tried  # in batches of 8
    failed = tried >= 5
    assert cells[2048].failed == failed
    assert cells[4096].note == ("not tried: none right at 2,048" if failed else "")
