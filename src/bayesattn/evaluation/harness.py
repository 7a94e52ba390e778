"""lm-eval's tasks on any reader, through its Python API."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.hub import hub_answers

# Tasks that need no data from anywhere.
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe", "ruler_cwe")


def check_tasks(tasks: Sequence[str], known: Collection[str]) -> None:
    """One sentence for tasks that are not among those lm-eval knows, or that cannot be had without the hub."""
    if unknown := sorted(set(tasks) - set(known)):
        raise UserError(f"lm-eval has no task {unknown[0]!r}; `lm_eval ls tasks` lists those it has")
    far = [task for task in tasks if task not in OFFLINE]
    if far and not hub_answers():
        raise UserError(
            f"{', '.join(far)} may need data from the hub, which cannot be reached; "
            f"without it there are {', '.join(OFFLINE)}"
        )


def run(
    reader: Reader, tasks: Sequence[str], *, length: int, limit: int | None = None, shots: int | None = None
) -> dict[str, dict[str, Any]]:
    """Metrics by task, as lm-eval gives them; `length` is the longest context, and that of RULER's tasks.

    `limit` is the number of documents of each task, `shots` that of examples in the prompt.
    """
    reader.check_length(length)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("lm-eval's tasks need: pip install 'bayesattn[harness]'") from missing
    with TemporaryDirectory() as folder:  # RULER's tasks load the tokenizer by themselves
        reader.tokenizer.save_pretrained(folder)
        manager = TaskManager(metadata={"tokenizer": folder, "max_seq_lengths": [length]})
        check_tasks(tasks, manager.all_tasks)
        model = HFLM(pretrained=reader.model, tokenizer=reader.tokenizer, max_length=length, batch_size=1)
        found = simple_evaluate(
            model=model, tasks=list(tasks), limit=limit, num_fewshot=shots, task_manager=manager, log_samples=False
        )
    results: dict[str, dict[str, Any]] = found["results"]
    return results
