"""Compare the result files of models: does one really retrieve better than another?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.intervals import newcombe
from bayesattn.schemas import Number, Row, Share, Tokens, Whole, Wrong
from bayesattn.studies import study
from bayesattn.studies.results import load_result, read_results
from bayesattn.studies.study import Progress, Result, Study, all_studies

# Quantiles of the normal distribution: for a 95% interval, and for a power of 80%.
Z, POWER = 1.96, 0.84
# Settings that may differ: results of any seed are of the same measurement, and names are those of tasks.
MAY_DIFFER = {"seed", "name"}


@dataclass(frozen=True)
class Settings(study.Settings):
    """Show which model retrieves better, and by how much.

    It also shows whether there are enough trials to tell.

    Example: bayesattn compare runs/passkey-rope-tiny/passkey.json runs/passkey-bam-tiny/passkey.json
    """

    file: ClassVar[str] = "compare"

    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json…", help="Two or more result files of eval passkey or eval needle."),
    ]


@dataclass(frozen=True)
class Comparison(Row):
    """Two models at one length of a task: the second minus the first, with a 95% interval of the difference.

    `needed` is the number of trials of each model that would show this difference with a power of 80%; None without a
    difference. If a model has no trials, there is no difference and `note` says why.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    task: str
    length: Tokens
    first: str
    second: str
    share_first: Share | None
    share_second: Share | None
    trials_first: Whole
    trials_second: Whole
    difference: Number | None
    low: Number | None
    high: Number | None
    needed: Whole | None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "not tried"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "cannot tell"

    @staticmethod
    def fits(row: Mapping[str, Any]) -> Wrong | None:
        """A difference has an interval."""
        absent = {row[name] is None for name in ("difference", "low", "high")}
        return None if len(absent) == 1 else (".difference", "has no interval, or an interval has no difference")


@dataclass(frozen=True, kw_only=True)
class Comparisons(Result):
    """Each model against the first, by task and length."""

    rows: list[Comparison]


def run(settings: Settings, progress: Progress[Comparisons]) -> Comparisons:
    return Comparisons(rows=compare(settings.files))


def compare(files: Sequence[Path]) -> list[Comparison]:
    """Compare the model of each file with that of the first file, at the tasks and lengths that both have.

    Raises:
        UserError: the files cannot be compared.
    """
    if len(files) < 2:
        raise UserError(f"{len(files)} file is given; a comparison needs at least two")
    kinds = [study.kind for study in all_studies() if study.trials is not None]
    contents = [read_results(file, *kinds) for file in files]
    for file, content in zip(files, contents, strict=True):
        if content["kind"] != contents[0]["kind"]:
            raise UserError(
                f"{file} has results of {content['kind']} and {files[0]} of {contents[0]['kind']}; one kind is needed"
            )
    ours = contents[0].get("settings", {})
    for file, content in zip(files[1:], contents[1:], strict=True):
        theirs = content.get("settings", {})
        keys = (ours.keys() | theirs.keys()) - MAY_DIFFER
        if differing := sorted(key for key in keys if ours.get(key) != theirs.get(key)):
            raise UserError(
                f"{file} and {files[0]} differ in {', '.join(differing)}; only the same settings can be compared"
            )
    tables = [_trials(file) for file in files]
    names = _names(files, contents)
    comparisons = []
    for name, table in zip(names[1:], tables[1:], strict=True):
        shared = [at for at in tables[0] if at in table]
        if not shared:
            what = "length" if {task for task, _ in tables[0]} & {task for task, _ in table} else "task"
            raise UserError(f"{names[0]} and {name} have no {what} in common")
        comparisons += [_compare_cells(task, names[0], name, tables[0][task, n], table[task, n]) for task, n in shared]
    return comparisons


def _trials(file: Path) -> dict[tuple[str, int], Cell]:
    """Cells by task and length."""
    of, result = load_result(file)
    return {} if of.trials is None else of.trials(result)


def _names(files: Sequence[Path], contents: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the models; of the files if two models have the same name."""
    models = [str(content["model"]) for content in contents]
    return models if len(set(models)) == len(models) else [str(file) for file in files]


def _compare_cells(task: str, first: str, second: str, a: Cell, b: Cell) -> Comparison:
    p, q = a.accuracy, b.accuracy
    if p is None or q is None:
        untried = [(name, cell.note or "not tried") for name, cell in ((first, a), (second, b)) if not cell.trials]
        note = "; ".join(f"{name} {why}" for name, why in untried)
        return Comparison(task, a.length, first, second, p, q, a.trials, b.trials, None, None, None, None, note)
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

    Scores in between vary less than right and wrong answers, so that this is narrower than an interval of counts. One
    score of 0 and one of 1 are added to each, as Agresti and Caffo do for shares: otherwise equal scores would have an
    interval of width 0.
    """
    p, q = [*scores, 0.0, 1.0], [*others, 0.0, 1.0]
    half = Z * math.sqrt(variance(p) / len(p) + variance(q) / len(q))
    difference = fmean(p) - fmean(q)
    return max(-1.0, difference - half), min(1.0, difference + half)


def trials_needed(p: float, q: float) -> int | None:
    """Trials of each of two models with true shares p and q that show their difference with a power of 80%."""
    if p == q:
        return None
    mean = (p + q) / 2
    spread = Z * math.sqrt(2 * mean * (1 - mean)) + POWER * math.sqrt(p * (1 - p) + q * (1 - q))
    return math.ceil((spread / (p - q)) ** 2)


def scores_needed(scores: Sequence[float], others: Sequence[float]) -> int | None:
    """`trials_needed` for means of scores that vary as these do."""
    difference = fmean(scores) - fmean(others)
    if difference == 0:
        return None
    spread = variance([*scores, 0.0, 1.0]) + variance([*others, 0.0, 1.0])
    return math.ceil((Z + POWER) ** 2 * spread / difference**2)


STUDY = Study(kind="compare", commands={"compare": Settings}, run=run, result=Comparisons, place=90)
