"""What a launcher starts in `test_processes.py`: it follows recipes, one after another, in each process.

`torchrun … -m tests.training.launched FOLDER` reads `FOLDER/runs.json`, a list of `Run` as dictionaries. The run named
`name` is in `FOLDER/name`, and the contexts that each process saw are in `FOLDER/contexts-NAME-RANK.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bayesattn import cli
from bayesattn.errors import UserError
from bayesattn.training import run as training
from bayesattn.training.recipe import parse_recipe
from bayesattn.training.trainer import ContextTrainer

RANK = int(os.environ.get("RANK", "0"))
TRAINING_STEP, COMPUTE_LOSS = ContextTrainer.training_step, ContextTrainer.compute_loss


@dataclass
class Run:
    name: str
    recipe: dict[str, Any]
    resume: bool = False
    failure: str = ""  # what happens at step 3: stop, terminate, kill, bug, mistake, nan
    failing: int | None = None  # the rank that it happens to; all if it is None
    own_folders: bool = False  # each process has a folder of its own, FOLDER/NAME-RANK
    command: bool = False  # train on the command line


class StopError(Exception):
    """The end of a run that the next one resumes."""


def follow(run: Run, folder: Path) -> None:
    """Train as a run says, and keep the contexts that this process saw."""
    seen: list[list[list[int]]] = []

    def fails(self: ContextTrainer) -> bool:
        return self.state.global_step == 3 and run.failing in (None, RANK)

    def training_step(self: ContextTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if run.failure and fails(self):
            fail(run.failure)
        seen.append(inputs["input_ids"].tolist())
        return TRAINING_STEP(self, model, inputs, *args, **kwargs)

    def compute_loss(self: ContextTrainer, *args: Any, **kwargs: Any) -> Any:
        return COMPUTE_LOSS(self, *args, **kwargs) * (float("nan") if run.failure == "nan" and fails(self) else 1.0)

    ContextTrainer.training_step, ContextTrainer.compute_loss = training_step, compute_loss  # type: ignore[method-assign]
    out = folder / (f"{run.name}-{RANK}" if run.own_folders else run.name)
    try:
        if run.command:
            (folder / f"{run.name}.yaml").write_text(yaml.safe_dump(run.recipe))
            sys.argv = ["bayesattn", "train", str(folder / f"{run.name}.yaml"), "--out", str(out)]
            cli.main()
        training.train(parse_recipe(run.recipe), out, resume=run.resume, eval_trials={2: 1})
    except StopError:
        pass
    finally:
        ContextTrainer.training_step, ContextTrainer.compute_loss = TRAINING_STEP, COMPUTE_LOSS  # type: ignore[method-assign]
    (folder / f"contexts-{run.name}-{RANK}.json").write_text(json.dumps(seen))


def fail(how: str) -> None:
    if how == "stop":
        raise StopError
    if how == "terminate":
        signal.raise_signal(signal.SIGTERM)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "bug":
        raise ZeroDivisionError("a bug")
    if how == "mistake":
        raise UserError("a mistake")


def main(folder: Path) -> None:
    for run in json.loads((folder / "runs.json").read_text()):
        follow(Run(**run), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
