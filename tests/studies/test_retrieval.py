"""Results of trials survive a kill at any moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from bayesattn.evaluation.trials import Clock
from bayesattn.studies.results import read_results
from tests.evaluation.test_trials import READER, Coins, Ticks
from tests.studies.saved import run_trials


def evaluate_all(file: Path, task: Coins, clock: Clock = Ticks()) -> None:  # noqa: B008  it stands still
    for _ in run_trials(READER, task, [2048, 4096, 8192], 60, file, kind="coins", clock=clock):
        pass


def evaluate_until_killed(file: Path, moments: int) -> None:
    """Kill the process at the given moment: at a batch, in the middle of a write, or before or after a rename."""

    def countdown() -> Iterator[None]:
        for _ in range(moments):
            yield
        os.kill(os.getpid(), signal.SIGKILL)

    moment = countdown()
    write_text, replace = Path.write_text, Path.replace

    def write_in_two(path: Path, text: str, **settings: Any) -> int:
        write_text(path, text[: len(text) // 2], **settings)
        next(moment)
        return write_text(path, text, **settings)

    def replace_slowly(path: Path, target: Path) -> Path:
        next(moment)
        path = replace(path, target)
        next(moment)
        return path

    Path.write_text, Path.replace = write_in_two, replace_slowly  # type: ignore[method-assign, assignment]
    evaluate_all(file, Coins(lambda _: next(moment)))


def test_killed_again_and_again_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    evaluate_all(tmp_path / "whole.json", Coins())
    file, random, before, kills = tmp_path / "killed.json", Random(0), 0, 0
    processes = multiprocessing.get_context("fork")
    while True:
        process = processes.Process(target=evaluate_until_killed, args=(file, random.randrange(20)))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        if file.exists():  # whole at any moment, and nothing finished is lost
            trials = sum(cell["trials"] for cell in read_results(file, "coins")["cells"])
            assert trials >= before
            before = trials
    assert kills >= 20
    assert read_results(file, "coins") == read_results(tmp_path / "whole.json", "coins")
