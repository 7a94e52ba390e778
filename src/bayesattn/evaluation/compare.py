"""Whether one model really reads better than another, from their result files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import newcombe
from bayesattn.evaluation.trials import Cell
from bayesattn.files import read_results

KINDS = ("passkey", "needle")
# Of the normal distribution: a 95% interval, and a chance of 80% to see a difference that is there.
Z, POWER = 1.96, 0.84


@dataclass(frozen=True)
class Comparison:
    """The second model less the first at one length of a task, with a 95% interval of the difference.

    `needed` is how many trials of each would show a difference as large as the one found, four times out of five; None
    if none was found. Where one of the models was not tried, `note` says why and there is no difference.
    """

    task: str
    length: int
    first: str
    second: str
    share_first: float | None
    share_second: float | None
    trials_first: int
    trials_second: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    needed: int | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "not tried"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "cannot tell"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(files: Sequence[Path]) -> list[Comparison]:
    """Each file's model against that of the first, at the tasks and lengths they share."""
    if len(files) < 2:
        raise UserError(f"{len(files)} file is given; a comparison needs at least two")
    contents = [read_results(file) for file in files]
    for file, content in zip(files, contents, strict=True):
        if content["kind"] not in KINDS:
            raise UserError(f"{file} has results of {content['kind']}; {' or '.join(KINDS)} is needed")
        if content["kind"] != contents[0]["kind"]:
            raise UserError(
                f"{file} has results of {content['kind']} and {files[0]} of {contents[0]['kind']}; they do not compare"
            )
    for file, content in zip(files[1:], contents[1:], strict=True):
        ours, theirs = (
            {key: value for key, value in c["settings"].items() if key not in ("seed", "name")}
            for c in (contents[0], content)
        )
        if differing := sorted(key for key in ours if ours[key] != theirs.get(key)):
            raise UserError(
                f"{file} was measured otherwise than {files[0]} ({', '.join(differing)}); they do not compare"
            )
    tables = [_table(content) for content in contents]
    names = _names(files, contents)
    found = []
    for name, table in zip(names[1:], tables[1:], strict=True):
        shared = [at for at in tables[0] if at in table]
        if not shared:
            what = "length" if {task for task, _ in tables[0]} & {task for task, _ in table} else "task"
            raise UserError(f"{names[0]} and {name} have no {what} in common")
        found += [_one(task, names[0], name, tables[0][task, n], table[task, n]) for task, n in shared]
    return found


def _table(content: Mapping[str, Any]) -> dict[tuple[str, int], Cell]:
    """Cells by task and length."""
    task = content["settings"]["name"] if content["kind"] == "needle" else content["kind"]
    return {(cell.get("task", task), cell["length"]): Cell.from_dict(cell) for cell in content["cells"]}


def _names(files: Sequence[Path], contents: Sequence[dict[str, Any]]) -> list[str]:
    """Of the models, or of the files where models have the same."""
    models = [str(content["model"]) for content in contents]
    return models if len(set(models)) == len(models) else [str(file) for file in files]


def _one(task: str, first: str, second: str, a: Cell, b: Cell) -> Comparison:
    p, q = a.accuracy, b.accuracy
    if p is None or q is None:
        untried = [(name, cell.note or "not tried") for name, cell in ((first, a), (second, b)) if not cell.trials]
        note = "; ".join(f"{name} {why}" for name, why in untried)
        return Comparison(task, a.length, first, second, p, q, a.trials, b.trials, note=note)
    scores = [[score for _, score in cell.outcomes] for cell in (a, b)]
    if all(score in (0, 1) for cell in scores for score in cell):
        low, high = newcombe(b.right, b.trials, a.right, a.trials)
        needed = trials_needed(p, q)
    else:
        low, high = difference_of_means(scores[1], scores[0])
        needed = scores_needed(scores[0], scores[1])
    return Comparison(task, a.length, first, second, p, q, a.trials, b.trials, q - p, low, high, needed)


def difference_of_means(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """95% interval of the difference of two means of scores from 0 to 1.

    Of means, and not of counts: an answer found in part varies less than one that is right or wrong. As Agresti and
    Caffo do for shares, one score of 0 and one of 1 are added to each, so that scores which happen to be all the same
    are not taken for certain.
    """
    p, q = [*scores, 0.0, 1.0], [*others, 0.0, 1.0]
    half = Z * math.sqrt(variance(p) / len(p) + variance(q) / len(q))
    difference = fmean(p) - fmean(q)
    return max(-1.0, difference - half), min(1.0, difference + half)


def trials_needed(p: float, q: float) -> int | None:
    """Of each of two models whose true shares are p and q, to tell them apart four times out of five."""
    if p == q:
        return None
    mean = (p + q) / 2
    spread = Z * math.sqrt(2 * mean * (1 - mean)) + POWER * math.sqrt(p * (1 - p) + q * (1 - q))
    return math.ceil((spread / (p - q)) ** 2)


def scores_needed(scores: Sequence[float], others: Sequence[float]) -> int | None:
    """The same of means of scores, which vary as these do."""
    difference = fmean(scores) - fmean(others)
    if difference == 0:
        return None
    spread = variance([*scores, 0.0, 1.0]) + variance([*others, 0.0, 1.0])
    return math.ceil((Z + POWER) ** 2 * spread / difference**2)
