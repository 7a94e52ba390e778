"""Results survive a kill at any moment."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt, run
from bayesattn.files import read_results


class Anything(Reader):
    most_positions = None

    def check_length(self, length: int) -> None:
        pass


class Slow:
    """A task whose trials take a moment, right or wrong by chance."""

    kind = "slow"
    seeded = "slow"
    answer_tokens = 1
    counts_answer = False

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def prompts(self, reader: Reader) -> MakePrompt:
        return lambda random, length, depth: Prompt([random.randrange(100)] * 3, ("",), random.random())

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        time.sleep(self.pause)
        return [float(prompt.ids[0] < 70) for prompt in prompts]

    def settings(self) -> dict[str, Any]:
        return {"task": "slow"}


def evaluate(file: Path, pause: float = 0.0) -> None:
    reader = Anything("anything", None, None, 128, "weights")
    for _ in run(reader, Slow(pause), [2048, 4096, 8192], 60, file):
        pass


def without_time(file: Path) -> dict[str, Any]:
    content = read_results(file, "slow")
    for cell in content["cells"]:
        del cell["seconds"]
    return content


def test_killed_again_and_again_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    evaluate(tmp_path / "whole.json")
    file, random, before, kills = tmp_path / "killed.json", Random(0), 0, 0
    processes = multiprocessing.get_context("fork")
    while True:
        process = processes.Process(target=evaluate, args=(file, 0.012))
        process.start()
        process.join(random.uniform(0.0, 0.05 * (1 + kills / 20)))  # longer and longer: a busy machine gets there too
        if not process.is_alive():
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        kills += 1
        if file.exists():  # whole at any moment, and nothing finished is lost
            trials = sum(cell["trials"] for cell in json.loads(file.read_text())["cells"])
            assert trials >= before
            before = trials
    assert kills >= 20
    assert without_time(file) == without_time(tmp_path / "whole.json")
