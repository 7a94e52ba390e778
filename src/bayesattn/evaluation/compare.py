"""Whether one model really reads better than another, from their result files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import newcombe
from bayesattn.evaluation.trials import Cell
from bayesattn.files import read_results

# Of the normal distribution: a 95% interval, and a chance of 80% to see a difference that is there.
Z, POWER = 1.96, 0.84


@dataclass(frozen=True)
class Comparison:
    """The second model less the first at one length, with Newcombe's 95% interval of the difference of two shares.

    `needed` is how many trials of each would show a difference as large as the one found, four times out of five; None
    if none was found.
    """

    length: int
    first: str
    second: str
    share_first: float
    share_second: float
    trials_first: int
    trials_second: int
    difference: float
    low: float
    high: float
    needed: int | None

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "cannot tell"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(files: Sequence[Path]) -> list[Comparison]:
    """Each file's model against that of the first, at the lengths they share."""
    if len(files) < 2:
        raise UserError(f"{len(files)} file is given; a comparison needs at least two")
    contents = [read_results(file, "passkey") for file in files]
    for file, content in zip(files[1:], contents[1:], strict=True):
        ours, theirs = ({k: v for k, v in c["settings"].items() if k != "seed"} for c in (contents[0], content))
        if differing := sorted(key for key in ours if ours[key] != theirs.get(key)):
            raise UserError(
                f"{file} was measured otherwise than {files[0]} ({', '.join(differing)}); they do not compare"
            )
    tables = [{cell["length"]: Cell.from_dict(cell) for cell in content["cells"]} for content in contents]
    names = _names(files, contents)
    found = []
    for name, table in zip(names[1:], tables[1:], strict=True):
        shared = sorted(n for n in tables[0].keys() & table.keys() if tables[0][n].trials and table[n].trials)
        if not shared:
            raise UserError(f"{names[0]} and {name} have no length in common")
        found += [_one(names[0], name, tables[0][length], table[length]) for length in shared]
    return found


def _names(files: Sequence[Path], contents: Sequence[dict[str, Any]]) -> list[str]:
    """Of the models, or of the files where models have the same."""
    models = [str(content["model"]) for content in contents]
    return models if len(set(models)) == len(models) else [str(file) for file in files]


def _one(first: str, second: str, a: Cell, b: Cell) -> Comparison:
    p, q = a.right / a.trials, b.right / b.trials
    low, high = newcombe(b.right, b.trials, a.right, a.trials)
    return Comparison(a.length, first, second, p, q, a.trials, b.trials, q - p, low, high, trials_needed(p, q))


def trials_needed(p: float, q: float) -> int | None:
    """Of each of two models whose true shares are p and q, to tell them apart four times out of five."""
    if p == q:
        return None
    mean = (p + q) / 2
    spread = Z * math.sqrt(2 * mean * (1 - mean)) + POWER * math.sqrt(p * (1 - p) + q * (1 - q))
    return math.ceil((spread / (p - q)) ** 2)
