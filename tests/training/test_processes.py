"""Training in several processes: the same run as in one, and an end of all when one of them ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesattn.training.callbacks import newest_checkpoint
from bayesattn.training.recipe import RecipeError
from bayesattn.training.run import split_batch
from tests.training.launched import Run, follow
from tests.training.test_run import recipe, weights

ROOT = Path(__file__).parents[2]
# The first five steps of RAdam are linear in the gradient, so that what is compared is the gradient itself.
LINEAR = {"training__steps": 5, "training__batch": 8, "training__optimizer": "radam", "training__lr": 0.1}
NEGATIVES = {
    "model__scalable_softmax": True,
    "augmentation__temperature_jitter": [0.5, 3.0],
    "augmentation__in_batch_negatives": 3,
}
UNEVEN = {
    "data__retrieval_share": 0.9,
    "data__short_share": 0.0,
    "data__answer_weight": 20.0,
    "data__hay_weight": 0.1,
    "data__filler_weight": 0.0,
    "training__evaluate_every": 2,
}
STREAM = {"data__stream": True, "data__retrieval_share": 0}
SAME_IN_ANY_NUMBER = {
    "plain": LINEAR | {"augmentation__temperature_jitter": None},
    "negatives-uneven-evaluated": LINEAR | NEGATIVES | UNEVEN,
    "accumulated": LINEAR | NEGATIVES | UNEVEN | {"augmentation__in_batch_negatives": 1, "training__device_batch": 2},
    "streamed": LINEAR | NEGATIVES | STREAM,
    "streamed-accumulated": LINEAR | NEGATIVES | STREAM
    | {"augmentation__in_batch_negatives": 0, "training__device_batch": 1},
}  # fmt: skip
RESUMED = {
    "resumed": LINEAR | NEGATIVES | {"data__retrieval_share": 0.5},
    "resumed-stream": LINEAR | NEGATIVES | STREAM,
}


def content(changes: dict[str, Any]) -> dict[str, Any]:
    return recipe(**changes).to_dict()


def launch(folder: Path, runs: list[Run], processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Follow the runs in processes of torchrun."""
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    return subprocess.run(
        [sys.executable, "-m", *command, "tests.training.launched", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,  # far below the time after which a collective call gives up
    )


def train_loss(folder: Path) -> float:
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    return float(last["train_loss"])


def contexts(folder: Path, name: str, processes: int) -> list[list[int]]:
    """All contexts that the processes saw, in the order of the parts of batches."""
    ranks = [json.loads((folder / f"contexts-{name}-{rank}.json").read_text()) for rank in range(processes)]
    return [context for parts in zip(*ranks, strict=True) for part in parts for context in part]


def assert_same_weights(one: Path, two: Path, exact: bool = False) -> None:
    first, second = weights(one / "model"), weights(two / "model")
    assert first.keys() == second.keys()
    for name, value in first.items():
        if exact:
            assert torch.equal(second[name], value), name
        else:
            torch.testing.assert_close(second[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of runs in one process and in two; one launch, because it takes longer than the runs."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    runs = [Run(name, content(changes)) for name, changes in (SAME_IN_ANY_NUMBER | RESUMED).items()]
    for run in runs:
        follow(run, one)
    for name, changes in RESUMED.items():
        changes = content(changes | {"training__save_every": 2})
        follow(Run(f"{name}-one-two", changes, failure="stop"), two)
        runs.append(Run(f"{name}-one-two", changes, resume=True))
        runs.append(Run(f"{name}-two-two", changes, failure="stop"))
        runs.append(Run(f"{name}-two-two", changes, resume=True))
        runs.append(Run(f"{name}-two-one", changes, failure="stop"))
    written = content(SAME_IN_ANY_NUMBER["streamed"] | {"training__evaluate_every": 2, "training__save_every": 2})
    done = launch(two, [*runs, Run("written", written, own_folders=True)])
    assert done.returncode == 0, done.stderr
    for name, changes in RESUMED.items():
        follow(Run(f"{name}-two-one", content(changes | {"training__save_every": 2}), resume=True), two)
    return one, two


@pytest.mark.parametrize("name", SAME_IN_ANY_NUMBER)
def test_two_processes_make_the_run_of_one(name: str, followed: tuple[Path, Path]) -> None:
    one, two = followed
    assert contexts(one, name, 1) == contexts(two, name, 2)
    assert train_loss(two / name) == pytest.approx(train_loss(one / name), rel=1e-6)
    assert_same_weights(one / name, two / name)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_in_any_number_of_processes(name: str, followed: tuple[Path, Path]) -> None:
    one, two = followed
    assert_same_weights(two / name, two / f"{name}-two-two", exact=True)
    assert_same_weights(one / name, two / f"{name}-one-two")
    assert_same_weights(one / name, two / f"{name}-two-one")


def test_the_main_process_alone_writes_files(followed: tuple[Path, Path]) -> None:
    _, two = followed
    files = {path.name for path in (two / "written-0").rglob("*") if path.is_file()}
    assert {"log.jsonl", "recipe.yaml", "model.safetensors", "rng_state.pth", "complete"} <= files
    assert not [path for path in (two / "written-1").rglob("*") if path.is_file()]
