"""Tasks of lm-eval on any reader, through lm-eval's Python API."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bayesattn.errors import UserError
from bayesattn.hub import hub_answers
from bayesattn.schemas import Anything, Tokens
from bayesattn.studies import study
from bayesattn.studies.options import Model, Tokenizer
from bayesattn.studies.study import Progress, Result, Study

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader

# Tasks that need no download.
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe", "ruler_cwe")


@dataclass(frozen=True)
class Settings(study.Settings):
    """Run tasks of lm-eval.

    Some of its tasks of RULER need no network.

    Example: bayesattn eval harness bam-tiny --tasks niah_single_1 --length 4096 --limit 20
    """

    file: ClassVar[str] = "harness"
    named: ClassVar[tuple[str, ...]] = ("model",)

    model: Model
    tasks: Annotated[str, typer.Option(metavar="NAME,…", help="Names of tasks of lm-eval.")] = "niah_single_1,ruler_vt"
    length: Annotated[
        int, typer.Option(min=64, max=2**40, help="Longest context, and the length of RULER's tasks.")
    ] = 4096
    limit: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Number of documents of each task; all by default.")
    ] = None
    shots: Annotated[int | None, typer.Option(min=0, max=1000, help="Number of examples in the prompt.")] = None
    tokenizer: Tokenizer = None


@dataclass(frozen=True, kw_only=True)
class Harness(Result):
    """Metrics by task, as lm-eval reports them."""

    model: str
    length: Tokens
    results: dict[str, dict[str, Anything]]


def run(settings: Settings, progress: Progress[Harness]) -> Harness:
    from bayesattn.evaluation.reader import load_reader

    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    tasks = settings.tasks.split(",")
    progress.step("running lm-eval")
    results = measure(reader, tasks, length=settings.length, limit=settings.limit, shots=settings.shots)
    return Harness(model=settings.model, length=settings.length, results=results)


def check_tasks(tasks: Sequence[str], known: Collection[str]) -> None:
    """Refuse tasks that lm-eval does not have, or that need the hub when it cannot be reached."""
    if unknown := sorted(set(tasks) - set(known)):
        raise UserError(f"lm-eval has no task {unknown[0]!r}; `lm_eval ls tasks` lists those it has")
    online = [task for task in tasks if task not in OFFLINE]
    if online and not hub_answers():
        raise UserError(
            f"{', '.join(online)} may need data from the hub, which cannot be reached; "
            f"these need none: {', '.join(OFFLINE)}"
        )


def measure(
    reader: Reader, tasks: Sequence[str], *, length: int, limit: int | None = None, shots: int | None = None
) -> dict[str, dict[str, Any]]:
    """Metrics of each task, as lm-eval reports them.

    Args:
        reader: the model and its tokenizer.
        tasks: names of lm-eval's tasks.
        length: tokens of the longest context, and of the prompts of RULER's tasks.
        limit: documents of each task; None for all.
        shots: examples in the prompt; None for the task's own number.
    """
    reader.check_length(length)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("lm-eval's tasks need: pip install 'bayesattn[harness]'") from missing
    with TemporaryDirectory() as folder:  # RULER's tasks load the tokenizer from a folder
        reader.tokenizer.save_pretrained(folder)
        manager = TaskManager(metadata={"tokenizer": folder, "max_seq_lengths": [length]})
        check_tasks(tasks, manager.all_tasks)
        with reader.checked_model() as pretrained:
            model = HFLM(pretrained=pretrained, tokenizer=reader.tokenizer, max_length=length, batch_size=1)
            output = simple_evaluate(
                model=model, tasks=list(tasks), limit=limit, num_fewshot=shots, task_manager=manager, log_samples=False
            )
    results: dict[str, dict[str, Any]] = output["results"]
    return results


STUDY = Study(kind="harness", commands={"eval harness": Settings}, run=run, result=Harness, place=50)
