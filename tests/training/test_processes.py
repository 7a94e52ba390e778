"""Training in several processes: the same run as in one, and an end of all when one of them ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesattn.training.callbacks import newest_checkpoint
from bayesattn.training.recipe import RecipeError
from bayesattn.training.run import split_batch, train
from tests.bad_inputs.rows import check_sentence
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
}
STREAM = {"data__stream": True, "data__retrieval_share": 0}
EVALUATED = {"training__evaluate_every": 2}
ACCUMULATED = {"augmentation__in_batch_negatives": 1, "training__device_batch": 2}
HALVES = {"training__steps": 10, "training__batch": 8, "training__device_batch": 4}
DELAYED = {"model__type": "delayed_keys", "model__key_delay": 4, "model__cross_layers": 1}
FEW = {
    "accumulated": LINEAR | NEGATIVES | UNEVEN | EVALUATED | ACCUMULATED,
    "streamed": LINEAR | NEGATIVES | STREAM,
}
MANY = {
    "plain": LINEAR | {"augmentation__temperature_jitter": None},
    "negatives": LINEAR | NEGATIVES | UNEVEN | EVALUATED,
    "delayed-keys": LINEAR | NEGATIVES | DELAYED,
    "streamed-accumulated": LINEAR | NEGATIVES | STREAM | ACCUMULATED,
    "rope": LINEAR | NEGATIVES | {"model__position": "rope"},
    "tied": LINEAR | NEGATIVES | {"model__tie_word_embeddings": True},
}
# One process sums the gradients of two parts in the order in which two processes do.
EXACT = {
    "muon": NEGATIVES | UNEVEN | EVALUATED | HALVES,
    "adamw": NEGATIVES | UNEVEN | HALVES | {"training__optimizer": "adamw", "model__learn_centre": True},
    "delayed-keys-exact": NEGATIVES | DELAYED | HALVES,
    "streamed-bf16": NEGATIVES | STREAM | HALVES | {"training__precision": "bf16"},
}
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
            torch.testing.assert_close(
                second[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text
            )


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `one` and `two`, runs in one process and in two; one launch, which takes longer than the runs."""
    return follow_in_both(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return follow_in_both(tmp_path_factory.mktemp("many"), MANY | EXACT)


def follow_in_both(folder: Path, recipes: dict[str, dict[str, Any]]) -> Path:
    runs = [Run(name, content(changes)) for name, changes in recipes.items()]
    for part in ("one", "two"):
        (folder / part).mkdir()
    for run in runs:
        follow(run, folder / "one")
    done = launch(folder / "two", runs)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", FEW)
def test_two_processes_make_the_run_of_one(name: str, few: Path) -> None:
    assert_same_run(few, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY | EXACT)
def test_two_processes_make_any_run_of_one(name: str, many: Path) -> None:
    assert_same_run(many, name, exact=name in EXACT)


def assert_same_run(folder: Path, name: str, exact: bool = False) -> None:
    one, two = folder / "one", folder / "two"
    assert contexts(one, name, 1) == contexts(two, name, 2)
    assert train_loss(two / name) == pytest.approx(train_loss(one / name), rel=1e-6)
    assert_same_weights(one / name, two / name, exact)


@pytest.mark.slow
def test_a_run_resumes_in_any_number_of_processes(tmp_path: Path) -> None:
    runs = []
    for name, changes in RESUMED.items():
        saved = content(changes | {"training__save_every": 2})
        follow(Run(f"{name}-one", saved), tmp_path)
        follow(Run(f"{name}-one-two", saved, failure="stop"), tmp_path)
        runs += [
            Run(f"{name}-two", saved),
            Run(f"{name}-one-two", saved, resume=True),
            Run(f"{name}-two-two", saved, failure="stop"),
            Run(f"{name}-two-two", saved, resume=True),
            Run(f"{name}-two-one", saved, failure="stop"),
        ]
    done = launch(tmp_path, runs)
    assert done.returncode == 0, done.stderr
    for name, changes in RESUMED.items():
        saved = content(changes | {"training__save_every": 2})
        follow(Run(f"{name}-two-one", saved, resume=True), tmp_path)
        assert_same_weights(tmp_path / f"{name}-two", tmp_path / f"{name}-two-two", exact=True)
        for resumed in ("one-two", "two-one"):
            assert_same_weights(tmp_path / f"{name}-one", tmp_path / f"{name}-{resumed}")


@pytest.mark.slow
def test_the_main_process_alone_writes_files(tmp_path: Path) -> None:
    changes = LINEAR | STREAM | EVALUATED | {"training__save_every": 2}
    done = launch(tmp_path, [Run("run", content(changes), own_folders=True)])
    assert done.returncode == 0, done.stderr
    main, other = ({path.name for path in (tmp_path / f"run-{n}").rglob("*") if path.is_file()} for n in (0, 1))
    assert {"log.jsonl", "recipe.yaml", "model.safetensors", "rng_state.pth", "complete"} <= main
    assert not other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "failing", "says"),
    [
        ("kill", 0, "exitcode  : -9"),
        ("kill", 1, "exitcode  : -9"),
        ("bug", 0, "ZeroDivisionError: a bug"),
        ("bug", 1, "ZeroDivisionError: a bug"),
        ("mistake", None, "bayesattn: a mistake\n"),
        ("mistake", 0, "bayesattn: a mistake\n"),
        ("mistake", 1, "bayesattn: a mistake\n"),
        ("nan", None, "bayesattn: the loss became nan at step 4; the last good checkpoint is "),
        ("nan", 1, "bayesattn: the loss became nan at step 4; the last good checkpoint is "),
    ],
)
def test_a_process_that_fails_ends_the_others_with_one_message(
    failure: str, failing: int | None, says: str, tmp_path: Path, tried: Any
) -> None:
    tried("processes that failed", 1)
    saved = content(LINEAR | {"training__save_every": 2})
    done = launch(tmp_path, [Run("run", saved, failure=failure, failing=failing, command=True)])
    assert done.returncode != 0
    assert done.stderr.count(says) == 1, done.stderr
    # Besides, a process that is still there may say that another one is gone.
    sentences = [
        line for line in done.stderr.splitlines() if line.startswith("bayesattn: ") and says.strip() not in line
    ]
    known = ("bayesattn: another process of the run has ended; ", "bayesattn: stopped by SIGTERM; ")  # by the launcher
    assert all(line.startswith(known) for line in sentences), sentences
    assert len(sentences) <= 1
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("receiving", [0, 1])
def test_a_signal_to_one_process_ends_all_with_its_exit_code_and_one_line(receiving: int, tmp_path: Path) -> None:
    """Without a launcher, which would pass the signal on."""
    run = Run("run", content(LINEAR), failure="terminate", failing=receiving, command=True)
    (tmp_path / "runs.json").write_text(json.dumps([asdict(run)]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.launched", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [143, 143], said
    newest = tmp_path / "run" / "checkpoint-4"
    line = f"bayesattn: stopped by SIGTERM; the last good checkpoint is {newest}, and --resume goes on from it"
    assert [line for text in said for line in text.splitlines() if line.startswith("bayesattn: ")] == [line]
    assert newest_checkpoint(tmp_path / "run") == newest


@pytest.mark.slow
def test_a_mistake_in_a_recipe_is_said_once(tmp_path: Path) -> None:
    done = launch(tmp_path, [Run("run", content({}) | {"seed": -1}, command=True)])
    assert done.returncode != 0
    assert done.stderr.count("bayesattn: seed is -1; ") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_with_one_process_makes_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "launched").mkdir()
    run = Run("run", content(FEW["accumulated"]))
    follow(run, tmp_path)
    done = launch(tmp_path / "launched", [run], processes=1)
    assert done.returncode == 0, done.stderr
    assert_same_weights(tmp_path / "run", tmp_path / "launched" / "run")


@pytest.mark.slow
def test_accelerate_on_cpus_is_not_taken_for_several_processes(tmp_path: Path) -> None:
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "bayesattn.cli", "train"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "recipes/bam-tiny.yaml", "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "RANK"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "bayesattn: accelerate launch was asked for several processes and started one" in done.stderr
    assert "type `torchrun --nproc_per_node 2 -m bayesattn.cli train …`" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_launcher_does_not_change_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights(train(recipe(training__steps=1), tmp_path / "plain"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    again = weights(train(recipe(training__steps=1), tmp_path / "again"))
    assert all(torch.equal(value, again[name]) for name, value in plain.items())


def test_negatives_that_depend_on_the_number_of_devices_are_refused() -> None:
    negatives = {"training__batch": 12, "augmentation__in_batch_negatives": 3}
    assert split_batch(recipe(**negatives), 1) == (12, 1)
    assert split_batch(recipe(**negatives), 3) == (4, 1)
    assert split_batch(recipe(**negatives, training__device_batch=6), 2) == (6, 1)
    with pytest.raises(RecipeError) as caught:
        split_batch(recipe(**negatives), 2)
    check_sentence(str(caught.value), "each of 2 devices takes 6 contexts, not a multiple of 4")
