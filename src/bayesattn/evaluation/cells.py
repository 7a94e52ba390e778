"""The trials of a task at one length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bayesattn.errors import shown
from bayesattn.evaluation.intervals import wilson
from bayesattn.schemas import ROUNDING, Amount, Row, Share, Tokens, Whole, Wrong, digits

# A length has failed if none of its first trials is right: the first 20, or all if there are fewer, but at least 5.
FAILED_AFTER, LEAST_FAILED = 20, 5


@dataclass(frozen=True)
class Cell(Row):
    """The trials at one length."""

    derived: ClassVar[tuple[str, ...]] = ("trials", "correct", "accuracy", "low", "high")

    length: Tokens
    outcomes: tuple[tuple[Share, Share], ...] = field(default=(), metadata=digits(4))
    """Depth and score of each trial."""
    seconds: Amount = field(default=0.0, metadata=digits(3))
    planned: Whole = 0
    """Trials that there are to be."""
    note: str = ""
    """Why there are fewer trials than planned."""
    task: str | None = None
    """Where several tasks are in one file: which of them."""

    @property
    def trials(self) -> Whole:
        return len(self.outcomes)

    @property
    def right(self) -> float:
        """The sum of the scores: the number of right answers if each is right or wrong."""
        total = sum(score for _, score in self.outcomes)
        return int(total) if total == int(total) else total

    @property
    def correct(self) -> Amount:
        return self.right

    @property
    def accuracy(self) -> Share | None:
        return self.right / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.right, self.trials)

    @property
    def low(self) -> Share:
        return self.interval[0]

    @property
    def high(self) -> Share:
        return self.interval[1]

    @property
    def failed(self) -> bool:
        enough = max(LEAST_FAILED, min(FAILED_AFTER, self.planned))
        return bool(self.note) or (self.right == 0 and self.trials >= enough)

    def __str__(self) -> str:
        if self.accuracy is None:
            return self.note or "not tried"
        return f"{self.accuracy:.0%} ({self.right:g}/{self.trials}, 95% interval {self.low:.0%} … {self.high:.0%})"

    @staticmethod
    def fits(cell: Mapping[str, Any]) -> Wrong | None:
        """Counts and shares follow from the outcomes."""
        trials, correct = cell["trials"], cell["correct"]
        if trials != len(cell["outcomes"]):
            return ".trials", f"is {trials} and there are {len(cell['outcomes'])} outcomes; both must be the same"
        if correct > trials:
            return ".correct", f"is {correct} of {trials} trials; at most all of them are allowed"
        if abs(correct - sum(score for _, score in cell["outcomes"])) > ROUNDING * max(1, trials):
            return ".correct", f"is {correct}, which is not the sum of the outcomes"
        share = correct / trials if trials else None
        if (share is None) != (cell["accuracy"] is None) or (
            share is not None and not math.isclose(share, cell["accuracy"], abs_tol=ROUNDING)
        ):
            return ".accuracy", f"is {shown(cell['accuracy'])} and {correct} of {trials} trials are right"
        return None
