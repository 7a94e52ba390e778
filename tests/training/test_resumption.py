"""Runs that a signal, a full disk or a kill ends, and what resuming them leaves."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesattn import interrupts
from bayesattn.data.contexts import Contexts
from bayesattn.errors import UserError
from bayesattn.interrupts import Interrupted, interruptible
from bayesattn.training.callbacks import newest_checkpoint
from bayesattn.training.recipe import Recipe, RecipeError
from bayesattn.training.run import _named_errors, train
from bayesattn.training.trainer import ContextTrainer, TrainingStoppedError
from tests.bad_inputs.rows import check_sentence
from tests.training import test_run
from tests.training.test_run import weights

STREAM = {"data__stream": True, "data__retrieval_share": 0}
# What a log has of the clock.
SECONDS = ("seconds", "train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text, which is encoded in no time."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"A river runs by stone {number}, and the hills are far away. " for number in range(300)))
    return file


@pytest.fixture(scope="module")
def recipe(text: Path) -> Callable[..., Recipe]:
    return lambda **changes: test_run.recipe(data__source=str(text), **changes)


@pytest.fixture(scope="module")
def whole(recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    train(recipe(), out)
    return out


@pytest.fixture(autouse=True)
def default_handlers() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def log(out: Path) -> list[dict[str, Any]]:
    """The log of a run, without seconds."""
    entries = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [{key: value for key, value in entry.items() if key not in SECONDS} for entry in entries]


def check_same_run(out: Path, whole: Path) -> None:
    assert log(out) == log(whole)
    ours, theirs = weights(out / "model"), weights(whole / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert {path.name for path in (out / "model").iterdir()} == {path.name for path in (whole / "model").iterdir()}


@contextmanager
def at_step(number: int, action: Callable[[], object]) -> Iterator[None]:
    """Within it, training does `action` in the middle of a step."""
    step = ContextTrainer.training_step

    def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == number - 1:
            action()
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextTrainer, "training_step", stopped)
        yield


@pytest.mark.parametrize(
    ("number", "changes"),
    [(signal.SIGINT, {"training__device_batch": 1}), (signal.SIGTERM, {**STREAM, "training__save_every": 0})],
    ids=["SIGINT", "SIGTERM, stream"],
)
def test_a_stopped_run_has_a_checkpoint_of_its_last_step_and_goes_on_as_if_it_had_not_been(
    number: int,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: Callable[..., Recipe],
) -> None:
    run = recipe(**{"training__steps": 55, "training__save_every": 20, **changes})
    train(run, tmp_path / "whole")
    out = tmp_path / "run"
    for step in (13, 27, 54, 55):
        with at_step(step, lambda: signal.raise_signal(number)), interruptible(), pytest.raises(Interrupted) as stopped:
            train(run, out, resume=True)
        newest = out / f"checkpoint-{step}"
        assert newest_checkpoint(out) == newest
        assert stopped.value.number == number
        assert stopped.value.kept == f"the last good checkpoint is {newest}, and --resume goes on from it"
        assert capsys.readouterr().err.endswith("\n")  # the progress bar has ended its line
    train(run, out, resume=True)
    check_same_run(out, tmp_path / "whole")


def test_a_second_signal_ends_a_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe]
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(interrupts, "AT_ONCE", -1.0)
        signal.raise_signal(signal.SIGINT)

    with (
        at_step(4, twice),
        interruptible(),
        pytest.raises(Interrupted, match="checkpoint-2, and --resume goes on from it"),
    ):
        train(recipe(), tmp_path)
    assert not (tmp_path / "checkpoint-4").exists()


def test_a_run_without_a_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe]
) -> None:
    monkeypatch.setattr(interrupts, "AT_ONCE", -1.0)

    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    with at_step(1, twice), interruptible(), pytest.raises(Interrupted, match="there is no checkpoint to resume from"):
        train(recipe(), tmp_path)


def test_in_a_program_ctrl_c_is_that_of_python_and_leaves_a_checkpoint(
    tmp_path: Path, recipe: Callable[..., Recipe]
) -> None:
    with at_step(3, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_run_that_died_before_its_last_entry_logs_it(
    tmp_path: Path, recipe: Callable[..., Recipe], whole: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    file = tmp_path / "run" / "log.jsonl"
    (*before, last) = file.read_text().splitlines(keepends=True)
    assert "train_loss" in last
    file.write_text("".join(before) + last[:9])
    train(recipe(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


def test_what_a_killed_run_left_half_written_is_removed(
    tmp_path: Path, recipe: Callable[..., Recipe], whole: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "model").rename(out / "model.old")
    (out / "model.partial").mkdir()
    (out / "model.partial" / ".tmpX").write_text("half")
    (out / "checkpoint-5").mkdir()
    (out / "checkpoint-5" / "model.safetensors").write_text("half")
    train(recipe(), out, resume=True)
    check_same_run(out, whole)
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


def test_the_final_model_is_written_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe], whole: Path
) -> None:
    def failed(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bayesattn.training.run.card", failed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "model.partial").exists()
    train(recipe(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("step", ["model", "model.partial"])
def test_a_model_is_kept_until_another_has_taken_its_place(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe]
) -> None:
    run, rename = recipe(training__steps=1, training__save_every=0), Path.rename
    before = weights(train(run, tmp_path))

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == step:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path, resume=True)
    kept = weights(tmp_path / "model")
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    assert not {"model.partial", "model.old"} & {path.name for path in tmp_path.iterdir()}


def test_a_model_that_a_killed_run_was_replacing_is_kept(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    run = recipe(training__steps=1, training__save_every=0)
    before = weights(train(run, tmp_path))
    (tmp_path / "model").rename(tmp_path / "model.old")  # a kill between two renames
    with pytest.raises(RecipeError, match="has a run already"):
        train(run, tmp_path)
    with at_step(1, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        train(run, tmp_path, resume=True)
    kept = weights(tmp_path / "model")
    assert all(torch.equal(kept[name], value) for name, value in before.items())


def test_a_disk_that_fills_up_during_training_is_named_with_the_last_checkpoint(
    tmp_path: Path, recipe: Callable[..., Recipe], whole: Path
) -> None:
    """The system refuses to write more than a few kB to a file, which no checkpoint fits into."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does when it starts
    small = (20_000, limits[1])
    try:
        with (
            at_step(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, small)),
            pytest.raises(TrainingStoppedError) as stopped,
        ):
            train(recipe(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    check_sentence(str(stopped.value), f"there is no room left on the disk of {tmp_path}; the last good checkpoint is")
    train(recipe(), tmp_path, resume=True)
    check_same_run(tmp_path, whole)


def test_a_full_disk_at_the_start_is_named(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    (tmp_path / "recipe.yaml.partial").symlink_to("/dev/full")  # every write to it fails as on a full disk
    with pytest.raises(UserError) as stopped:
        train(recipe(), tmp_path)
    check_sentence(str(stopped.value), str(tmp_path))


@pytest.mark.parametrize("folder", ["/proc/run", "file/run", "file"])
def test_a_folder_that_cannot_be_made_is_named(folder: str, tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingStoppedError) as stopped:
        train(recipe(), tmp_path / folder)
    check_sentence(str(stopped.value), f"{tmp_path / folder} cannot be read or written")


def test_a_checkpoint_is_not_blamed_for_a_model_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe], whole: Path
) -> None:
    def failed(*_: Any) -> str:
        raise ZeroDivisionError("a bug")

    out = tmp_path / "run"
    shutil.copytree(whole, out)
    monkeypatch.setattr("bayesattn.training.run.card", failed)
    with pytest.raises(ZeroDivisionError):
        train(recipe(), out, resume=True)


def test_a_checkpoint_is_not_blamed_for_contexts_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Recipe], whole: Path
) -> None:
    def failed(*_: Any) -> Any:
        raise ConnectionError("no answer")

    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-6")
    monkeypatch.setattr(Contexts, "__getitem__", failed)
    with pytest.raises(ConnectionError):
        train(recipe(), out, resume=True)


@pytest.mark.parametrize(
    ("step", "file"),
    [(6, "model.safetensors"), (6, "trainer_state.json"), (6, "loss.json"), (4, "optimizer.pt"), (4, "rng_state.pth")],
)
def test_a_damaged_file_of_a_checkpoint_names_the_checkpoint(
    step: int, file: str, tmp_path: Path, recipe: Callable[..., Recipe], whole: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for later in range(step + 1, 7):
        shutil.rmtree(out / f"checkpoint-{later}", ignore_errors=True)
    (out / f"checkpoint-{step}" / file).write_bytes(b"damaged")
    with pytest.raises(TrainingStoppedError) as stopped:
        train(recipe(), out, resume=True)
    assert str(stopped.value).startswith(f"training cannot resume from {out}/checkpoint-{step} (")
    assert str(stopped.value).endswith("remove it to try the one before")


def test_a_file_of_a_folder_with_a_longer_name_is_not_one_of_the_run(tmp_path: Path) -> None:
    other = tmp_path / "run10" / "text.txt"
    with pytest.raises(FileNotFoundError), _named_errors(tmp_path / "run1"):
        other.read_text()
    with (
        pytest.raises(TrainingStoppedError, match=r"run1/places\.jsonl cannot be read or written"),
        _named_errors(tmp_path / "run1"),
    ):
        (tmp_path / "run1" / "places.jsonl").read_text()


def test_memory_that_is_used_up_is_said_in_one_sentence(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    with at_step(3, lambda: torch.empty(2**50)), pytest.raises(TrainingStoppedError) as stopped:
        train(recipe(), tmp_path)
    check_sentence(
        str(stopped.value), "there is no memory for 2 contexts at a time; a smaller training.device_batch is"
    )
    assert str(stopped.value).endswith(
        f"the last good checkpoint is {tmp_path}/checkpoint-2, and --resume goes on from it"
    )


@pytest.mark.parametrize("content", [b"name: [", b"\xff", b"- 5", b"a: *b", b"x: \0"])
def test_a_damaged_recipe_beside_a_run_is_refused(
    content: bytes, tmp_path: Path, whole: Path, recipe: Callable[..., Recipe]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as refused:
        train(recipe(), tmp_path / "run", resume=True)
    check_sentence(str(refused.value), str(tmp_path / "run"))


def test_queries_and_keys_that_are_too_large_stop_a_run_in_one_sentence(
    tmp_path: Path, recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(TrainingStoppedError) as stopped:
        train(recipe(model__initializer_range=1e15), tmp_path)
    check_sentence(str(stopped.value), "training diverged: logits may reach")
