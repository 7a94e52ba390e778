"""What the heads of a model learned, step by step, from the log of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.errors import UserError, cut
from bayesattn.files import quoted, short_name, whole_lines
from bayesattn.schemas import Number, Row, Whole, Wrong, at_least, check_of
from bayesattn.studies import study
from bayesattn.studies.options import not_empty
from bayesattn.studies.study import Progress, Result, Study

LOG = "log.jsonl"
# Trained retrieval heads form two clusters. This β separates them.
AGGRESSIVE_BETA = -0.6


@dataclass(frozen=True)
class Settings(study.Settings):
    """Show what each head learned, step by step.

    The log of a training run has the parameters of every head's prior and its temperature, every 25 steps. For β the
    table names the cluster of each head, and the step from which on it is in it.

    Example: bayesattn history runs/bam-tiny
    """

    file: ClassVar[str] = "history"
    pictures: ClassVar[tuple[str, ...]] = ("history",)

    run: Annotated[
        str,
        typer.Argument(callback=not_empty, metavar="RUN", help="Folder of a run or of its model, or a log.jsonl."),
    ]

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"history-{run_name(self.run)}"


@dataclass(frozen=True)
class HeadHistory(Row):
    """The parameters of a head's prior and its temperature: by name, a number at each of the steps."""

    layer: Whole
    head: Whole
    parameters: dict[str, list[Number | None]]

    @property
    def clusters(self) -> list[str]:
        """The cluster at each step, for priors with β."""
        return [cluster(beta) for beta in self.parameters.get("beta", [])]

    def since(self, steps: list[int]) -> int | None:
        """The first of these steps from which on the head is in the cluster of its end; None without β."""
        names = self.clusters
        if not names:
            return None
        before = max((number for number, name in enumerate(names) if name != names[-1]), default=-1)
        return steps[before + 1]


def cluster(beta: float | None) -> str:
    """What β makes of a head."""
    if not beta:
        return "flat" if beta == 0 else "not finite"
    return "local" if beta > 0 else "retrieval" if beta > AGGRESSIVE_BETA else "aggressive retrieval"


@dataclass(frozen=True, kw_only=True)
class History(Result):
    """All heads of a run at the steps of its log."""

    run: str
    steps: Annotated[list[Whole], at_least(1)]
    heads: Annotated[list[HeadHistory], at_least(1)]

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
        """Every head has parameters, and each of these a value for each step."""
        steps = len(content["steps"])
        lengths = {len(values) for head in content["heads"] for values in head["parameters"].values()}
        if len(lengths) == 1 and steps not in lengths:
            return ".steps", f"has {steps} and heads have values at {lengths.pop()} steps"
        for place, head in enumerate(content["heads"]):
            if not head["parameters"]:
                return f".heads[{place}].parameters", "is empty"
            for name, values in head["parameters"].items():
                if len(values) != steps:
                    return (
                        f".heads[{place}].parameters",
                        f"has {len(values)} values of {cut(name, 40)} for {steps} steps",
                    )
        return None


def run(settings: Settings, progress: Progress[History]) -> History:
    return read_history(settings.run)


def run_name(run: str) -> str:
    """The name of a run for people: that of its folder."""
    path = Path(run)
    return short_name(str(path.parent)) if path.name == LOG else short_name(run)


def find_log(run: str) -> Path:
    """The log of a run: in its folder, in that of its model, or the file itself.

    Raises:
        UserError: there is none.
    """
    from bayesattn.models.shipped import resolve

    path = Path(resolve(run))
    for file in (path, path / LOG, path / "model" / LOG):
        if file.is_file():
            return file
    raise UserError(f"there is no log of a run in {quoted(path)}; its folder, or its {LOG}, is needed")


def read_history(run: str) -> History:
    """What the log of a run has of its heads.

    Raises:
        UserError: there is no log, it is damaged, or it has no heads.
    """
    file = find_log(run)
    by_step: dict[int, list[dict[str, list[float | None]]]] = {}
    try:
        for line in whole_lines(file):
            entry = json.loads(line)
            if "heads" in entry:
                by_step[entry["step"]] = entry["heads"]
        steps = sorted(by_step)
        history = History(run=run_name(str(run)), steps=steps, heads=_heads([by_step[step] for step in steps]))
        wrong = check_of(History)(history.to_dict()) if steps else None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OSError, RecursionError) as problem:
        raise UserError(f"{quoted(file)} is not the log of a run, or it is damaged") from problem
    if not steps:
        raise UserError(
            f"{quoted(file)} has nothing about heads: the run is of an earlier version, or its priors learn nothing"
        )
    if wrong:
        raise UserError(f"{quoted(file)} is not the log of a run: {wrong[0].removeprefix('.')} {wrong[1]}")
    return history


def _heads(logged: list[list[dict[str, list[float | None]]]]) -> list[HeadHistory]:
    """From layers at each step to one row a head."""
    rows = []
    for number, layer in enumerate(logged[-1] if logged else []):
        for head in range(max(map(len, layer.values()), default=0)):
            values = {name: [step[number][name][head] for step in logged] for name in layer}
            rows.append(HeadHistory(number, head, values))
    return rows


STUDY = Study(kind="history", commands={"history": Settings}, run=run, result=History, place=42)
