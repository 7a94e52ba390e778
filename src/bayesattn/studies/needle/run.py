"""RULER's tasks with growing prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bayesattn.evaluation.cells import Cell
from bayesattn.schemas import Anything, or_null, record, text, whole
from bayesattn.studies import study
from bayesattn.studies.options import Budget, Model, Multiples, Seed, Stop, Tokenizer, Trials, parse_multiples
from bayesattn.studies.retrieval import Retrieval, continued, identity, run_trials
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader
    from bayesattn.studies.needle.tasks import Task


@dataclass(frozen=True)
class Settings(study.Settings):
    """Run retrieval tasks with the prompts and scores of RULER.

    Tasks are needles among needles, chains of variables, and common words. The score is the mean share of the answers
    found. Results are saved after every batch; the same command resumes a stopped run, also with more tasks or lengths.

    Example: bayesattn eval needle bam-small --task multikey --lengths 1024,4096 --trials 50
    """

    file: ClassVar[str] = "needle"
    pictures: ClassVar[tuple[str, ...]] = ("needle",)
    named: ClassVar[tuple[str, ...]] = ("model", "seed")

    model: Model
    task: Annotated[str, typer.Option(metavar="NAME", help="single, multikey, multivalue, variables, … or all.")] = (
        "all"
    )
    lengths: Multiples = "4096,8192,16384"
    trials: Trials = 20
    budget: Budget = None
    stop: Stop = True
    tokenizer: Tokenizer = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Needles(Retrieval):
    """Trials by task and length, scored by the share of the answers found."""

    settings: Annotated[dict[str, Anything], record({"name": text, "seed": whole(), "depths?": or_null(whole(1))})]

    @property
    def by_task(self) -> dict[str, list[Cell]]:
        """Cells of each task. A cell without a name is of the only task of its file."""
        tasks: dict[str, list[Cell]] = {}
        for cell in self.cells:
            tasks.setdefault(cell.task or self.settings["name"], []).append(cell)
        return tasks


def run(settings: Settings, progress: Progress[Needles]) -> Needles:
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.studies.needle.tasks import KINDS, Task

    tasks = [Task(name) for name in (KINDS if settings.task == "all" else settings.task.split(","))]
    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    lengths = parse_multiples(settings.lengths, reader.train_length)
    for result in measure(progress, reader, tasks, lengths, settings.trials, seed=settings.seed, stop=settings.stop):
        progress.keep(result)
    return result


def measure(
    progress: Progress[Needles],
    reader: Reader,
    tasks: Sequence[Task],
    lengths: list[int],
    trials: int,
    *,
    seed: int = 0,
    stop: bool = True,
    **options: Any,
) -> Iterator[Needles]:
    """The result after every batch of trials. Trials of an earlier result are not repeated; tasks share the budget."""
    budget = None if progress.budget is None else progress.budget / len(tasks)
    extent = {"trials": trials, "budget": budget, "stop": stop}
    known = {**identity(reader), "settings": {"seed": seed, "depths": None}}
    earlier = progress.earlier(known)
    done = {} if earlier is None else replace(earlier, cells=continued(earlier, extent, trials)).by_task
    options |= {"seed": seed, "stop": stop, "budget": budget}
    for task in tasks:
        before = done.get(task.name, [])
        for cells in run_trials(progress, reader, task, lengths, trials, before, **options):
            done[task.name] = [replace(cell, task=task.name) for cell in cells]
            named = {**known["settings"], "name": ",".join(done)}
            every = [cell for name, part in done.items() for cell in (replace(c, task=name) for c in part)]
            yield Needles(**{**known, "settings": named}, cells=every, extent=extent)


STUDY = Study(
    kind="needle",
    commands={"eval needle": Settings},
    run=run,
    result=Needles,
    place=20,
    trials=lambda result: {(task, cell.length): cell for task, cells in result.by_task.items() for cell in cells},
)
