"""Tasks of lm-eval on any reader, through lm-eval's Python API."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.hub import hub_answers

# Tasks that need no download.
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_fwe", "ruler_cwe")


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


def run(
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
