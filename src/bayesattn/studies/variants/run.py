"""Gather what was measured on models of several variants and seeds: retrieval, perplexity, and what heads learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import wilson
from bayesattn.files import short_name
from bayesattn.schemas import Amount, Number, Positive, Row, Share, Tokens, Whole, Wrong, at_least, digits
from bayesattn.studies import study
from bayesattn.studies.history.run import LOG, cluster, read_history
from bayesattn.studies.passkey.run import Passkey
from bayesattn.studies.perplexity.run import Perplexity
from bayesattn.studies.results import load_result
from bayesattn.studies.study import Progress, Result, Study


@dataclass(frozen=True)
class Settings(study.Settings):
    """Gather results of variants and seeds in one table.

    Each run is a folder VARIANT-SEED, such as zeros-s0, with its log. Results of eval passkey and eval perplexity are
    anywhere in the given folder. They belong to the run whose model they name.

    Example: bayesattn variants runs/learned-or-placed --json docs/data/variants.json
    """

    file: ClassVar[str] = "variants"
    pictures: ClassVar[tuple[str, ...]] = ()

    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs, and with result files of their models.")
    ]
    earlier: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="An earlier result: its runs are added, except those whose name the folder has."
        ),
    ] = None

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"variants-{self.source.resolve().name}"


@dataclass(frozen=True)
class Trials(Row):
    """Pass keys at one length: right answers, and seconds a prompt."""

    derived: ClassVar[tuple[str, ...]] = ("low", "high")

    task: str
    length: Tokens
    right: Amount
    trials: Tokens
    seconds: Amount = field(metadata=digits(3))

    @property
    def low(self) -> Share:
        return wilson(self.right, self.trials)[0]

    @property
    def high(self) -> Share:
        return wilson(self.right, self.trials)[1]

    @staticmethod
    def fits(row: Mapping[str, Any]) -> Wrong | None:
        """No more are right than were tried."""
        return (".right", f"is {row['right']} of {row['trials']} trials") if row["right"] > row["trials"] else None


@dataclass(frozen=True)
class Loss(Row):
    """Perplexity after so many tokens, with its 95% interval."""

    text: str
    context: Whole
    perplexity: Positive
    low: Positive
    high: Positive


@dataclass(frozen=True)
class LearnedHead(Row):
    """A head at the end of training."""

    layer: Whole
    head: Whole
    parameters: dict[str, Number | None]

    @property
    def cluster(self) -> str | None:
        return cluster(self.parameters["beta"]) if "beta" in self.parameters else None


@dataclass(frozen=True)
class Run(Row):
    """One model: its variant and seed (None if its name has none), and what is known of it."""

    name: str
    variant: str
    train_length: Tokens
    cells: list[Trials]
    losses: list[Loss]
    heads: list[LearnedHead]
    seed: Whole | None = None
    steps: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Variants(Result):
    """All runs, by variant and then by seed."""

    runs: Annotated[list[Run], at_least(1)]


def run(settings: Settings, progress: Progress[Variants]) -> Variants:
    return gather(settings.source, progress, settings.earlier)


def gather(folder: Path, progress: Progress[Variants] | None = None, earlier: Path | None = None) -> Variants:
    """All runs of a folder, and those of an earlier result that have other names.

    Raises:
        UserError: the folder has no results of pass keys or perplexity, two files have the same measurement, or the
            earlier result is of another kind.
    """
    from bayesattn.studies.results import find_results

    progress = progress or Progress()
    cells: dict[str, list[Trials]] = {}
    losses: dict[str, list[Loss]] = {}
    lengths: dict[str, int] = {}
    files = find_results([folder])
    for number, file in enumerate(files):
        progress.step("reading results", number, len(files))
        _, result = load_result(file)
        if isinstance(result, Passkey):
            name = short_name(result.model)
            lengths[name] = result.train_length
            _add(cells.setdefault(name, []), _trials(result), file, name)
        elif isinstance(result, Perplexity):
            for model in result.models:
                name = short_name(model.model)
                lengths[name] = model.train_length
                rows = [Loss(result.text, row.context, row.perplexity, row.low, row.high) for row in model.rows]
                _add(losses.setdefault(name, []), rows, file, name)
    if not lengths:
        raise UserError(f"{folder} has no results of eval passkey or eval perplexity")
    logs = {_run_of(log): log for log in sorted(folder.rglob(LOG), key=lambda path: len(path.parts), reverse=True)}
    runs = [run for run in _runs_of(earlier) if run.name not in lengths]
    for name, train_length in lengths.items():
        variant, seed = split_name(name)
        heads, steps = _heads(logs[name]) if name in logs else ([], None)
        found, lost = cells.get(name, []), losses.get(name, [])
        runs.append(Run(name, variant, train_length, found, lost, heads, seed, steps))
    return Variants(runs=sorted(runs, key=lambda run: (run.variant, -1 if run.seed is None else run.seed)))


def _runs_of(earlier: Path | None) -> list[Run]:
    """The runs of an earlier result."""
    if earlier is None:
        return []
    _, result = load_result(earlier)
    if not isinstance(result, Variants):
        raise UserError(f"--earlier is {earlier}, a result of another kind; a result of variants is needed")
    return result.runs


def split_name(name: str) -> tuple[str, int | None]:
    """Variant and seed of a run: `zeros-1`, `zeros-s1` and `zeros-seed1` are seed 1 of `zeros`.

    With the letter, the seed may be in the middle: `zeros-s1-long` is seed 1 of `zeros-long`.
    """
    parts = re.fullmatch(r"(.+?)[-_](?:s|seed[-_]?)(\d{1,9})((?:[-_].+)?)", name) or re.fullmatch(
        r"(.+)[-_](\d{1,9})()", name
    )
    return (parts[1] + parts[3], int(parts[2])) if parts else (name, None)


def _run_of(log: Path) -> str:
    return short_name(str(log.parent))


def _trials(result: Passkey) -> list[Trials]:
    """What was tried, under the name of the task: its title, and the seed of its prompts if it is not 0."""
    seed = result.settings["seed"]
    task = result.title + (f", seed {seed}" if seed else "")
    return [
        Trials(task, cell.length, cell.right, cell.trials, cell.seconds / cell.trials)
        for cell in result.cells
        if cell.trials
    ]


def _add(known: list[Any], rows: Sequence[Any], file: Path, name: str) -> None:
    """Put rows of a file to those of earlier ones, unless one of them is there already."""
    keys = {_key(row) for row in known}
    for row in rows:
        if _key(row) in keys:
            what, size = _key(row)
            raise UserError(f"{file} and another file have results of {name} for {what} at {size:,} tokens; keep one")
    known += rows
    known.sort(key=_key)


def _key(row: Trials | Loss) -> tuple[str, int]:
    return (row.task, row.length) if isinstance(row, Trials) else (row.text, row.context)


def _heads(log: Path) -> tuple[list[LearnedHead], int | None]:
    """Heads at the end of a run, and its steps; none if its log has none."""
    try:
        history = read_history(str(log))
    except UserError:
        return [], None
    heads = [
        LearnedHead(head.layer, head.head, {name: values[-1] for name, values in head.parameters.items()})
        for head in history.heads
    ]
    return heads, history.steps[-1]


STUDY = Study(kind="variants", commands={"variants": Settings}, run=run, result=Variants, place=92)
