"""Runs and evaluations that are killed again and again end as if they had never been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bayesattn.training.callbacks import COMPLETE
from bayesattn.training.run import CARD
from tests.training.test_resumption import check_same_run
from tests.training.test_run import recipe

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Makes a process of the command line for every line that it reads, without the seconds of its imports, and writes its
# number; after an empty line, its exit code.
SERVER = """
import json, os, signal, sys
import bayesattn_cli
import bayesattn.cli
import bayesattn.evaluation.passkey, bayesattn.studies.passkey.dense, bayesattn.studies.passkey.show
import bayesattn.training.run, matplotlib.pyplot, transformers.models.auto

signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
for line in sys.stdin:
    arguments, errors = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["bayesattn", *arguments]
        code = 0
        try:
            bayesattn_cli.main()
        except SystemExit as end:
            code = end.code or 0
        sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
    sys.stdin.readline()  # until then the number is not another's
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Commands(NamedTuple):
    """The command line, run in processes that can be killed."""

    server: subprocess.Popen[str]
    errors: Path

    def run(self, arguments: list[str], number: int | None = None, after: float = 0.0) -> int:
        """The exit code of a command, which gets a signal after some seconds if it still runs."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps([arguments, str(self.errors)]), file=self.server.stdin, flush=True)
        pid = int(self.server.stdout.readline())
        if number is not None:
            time.sleep(after)
            os.kill(pid, number)
        print(file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def check_end(self, code: int, number: int) -> bool:
        """Whether a signal ended the command; that it ended as it should."""
        said = self.errors.read_text()
        assert "Traceback" not in said, said
        if number == signal.SIGKILL:
            assert code in (-signal.SIGKILL, 0)
        else:
            assert code in (128 + number, 0), said
            lines = [line for line in said.splitlines() if "stopped by" in line]
            assert len(lines) <= 1
            assert all(line.startswith("bayesattn: stopped by ") for line in lines)
            assert said.endswith("\n") or not said
        return code != 0


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    def ready() -> None:  # a test run in the background has SIGINT ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=ready
    )
    with process:
        yield Commands(process, tmp_path / "errors.txt")
        assert process.stdin is not None
        process.stdin.close()


def check_files(folder: Path) -> None:
    """All JSON parses, all checkpoints that are marked complete load, and so does the final model if it is there."""
    for file in folder.rglob("*.json"):
        if file.parent == folder or (file.parent / COMPLETE).exists():
            json.loads(file.read_text())
    for file in folder.glob("*.jsonl"):
        *lines, _ = file.read_text().split("\n")
        assert all(isinstance(json.loads(line), dict) for line in lines)
    for mark in folder.glob(f"checkpoint-*/{COMPLETE}"):
        assert load_file(mark.parent / "model.safetensors")
        assert torch.load(mark.parent / "optimizer.pt", weights_only=True)
    if (folder / "model").exists():
        assert (folder / "model" / CARD).exists()
        assert load_file(folder / "model" / "model.safetensors")


def steps_kept(out: Path) -> int:
    return max((int(path.parent.name.rpartition("-")[2]) for path in out.glob(f"checkpoint-*/{COMPLETE}")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_training_that_is_killed_ends_as_if_it_had_not_been(
    seed: int, commands: Commands, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"A river runs by stone {number}, and the hills are far away. " for number in range(300)))
    changes: dict[str, Any] = {"data__stream": True, "data__retrieval_share": 0} if seed % 2 else {}
    run = recipe(data__source=str(text), training__steps=60, training__save_every=4, **changes)
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(run.to_dict()))))
    train = ["train", str(tmp_path / "test.yaml"), "--resume", "--out"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    begin = time.monotonic()
    assert commands.run([*train, str(whole)]) == 0, commands.errors.read_text()
    seconds, random, kills, kept = time.monotonic() - begin, Random(seed), 0, 0
    while kills < 12:
        number = SIGNALS[kills % 3]
        code = commands.run([*train, str(out)], number, random.uniform(0.1, 1.0) * seconds)
        ended = commands.check_end(code, number)
        kills += ended
        check_files(out)
        assert steps_kept(out) >= kept
        kept = steps_kept(out)
        if not ended:  # it was faster than the signal
            check_same_run(out, whole)
            seconds *= 0.7
            kept = _forget(out, random)
    assert commands.run([*train, str(out)]) == 0
    check_same_run(out, whole)
    tried("kills", kills)


def _forget(out: Path, random: Random) -> int:
    """Go back in a finished run, so that there is something left to be killed; the step of its newest checkpoint."""
    shutil.rmtree(out / "model")
    newest = out / f"checkpoint-{steps_kept(out)}"
    if random.random() < 0.7:
        shutil.rmtree(newest)
    return steps_kept(out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_evaluation_that_is_killed_ends_as_if_it_had_not_been(
    seed: int, commands: Commands, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    def outcomes(file: Path) -> dict[int, list[list[float]]]:
        cells = json.loads(file.read_text())["cells"] if file.exists() else []
        return {cell["length"]: cell["outcomes"] for cell in cells}

    passkey = ["eval", "passkey", "bam-tiny", "--lengths", "128,700,1500,3000", "--trials", "60", "--no-stop", "--out"]
    begin = time.monotonic()
    assert commands.run([*passkey, str(tmp_path / "whole")]) == 0, commands.errors.read_text()
    seconds, random, kills = time.monotonic() - begin, Random(seed), 0
    whole = outcomes(tmp_path / "whole" / "passkey.json")
    kept: dict[int, list[list[float]]] = {}
    out = tmp_path / "run"
    while kills < 12:
        number = SIGNALS[kills % 3]
        code = commands.run([*passkey, str(out)], number, random.uniform(0.05, 0.7) * seconds)
        ended = commands.check_end(code, number)
        kills += ended
        check_files(out)
        now = outcomes(out / "passkey.json")
        for length, before in kept.items():
            assert now[length][: len(before)] == before
        kept = now
        if not ended:
            assert now == whole
            (out / "passkey.json").unlink()
            seconds *= 0.7
            kept = {}
    assert commands.run([*passkey, str(out)]) == 0
    assert outcomes(out / "passkey.json") == whole
    tried("kills", kills)
