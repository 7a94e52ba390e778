"""Every option and argument of every command with bad values: one sentence, exit code 2, and no file is touched.

The table is in commands.py. The first value of each option is in the fast set. `train` has tests of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from huggingface_hub import constants

from bayesattn.cli import app
from tests.bad_inputs.cases import write
from tests.bad_inputs.commands import EXECUTABLE, LINES, Line
from tests.bad_inputs.rows import LONGEST, Row, check_command_refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that are not what a command needs; the hub is off."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for subprocesses
    texts = {
        "taken": b"a file",
        "empty.txt": b"",
        "bytes.txt": b"\xff\xfe\xfa",
        "nested.json": b"[" * 100_000,
        "nan.json": b'{"version": 1, "kind": "passkey", "model": NaN}',
        "deep.jsonl": b"[" * 100_000 + b"\n",
        "number.jsonl": b'{"text": 3}\n',
        "odd/config.json": b'{"model_type": "bam", "hidden_size": "many"}',
        "strange/config.json": b"[1, 2]",
        "deep/config.json": b"[" * 100_000,
    }
    for name, content in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    write(tmp_path / "good.json", "passkey")
    write(tmp_path / "fit.json", "fit")
    return tmp_path


def rows(lines: list[Line]) -> list[Any]:
    seen: set[str] = set()
    cases = []
    for start, values, says in lines:
        for value in values:
            slow = start in seen or "--tasks" in start  # which starts lm-eval
            cases.append(pytest.param(Row(start, value, says), marks=[pytest.mark.slow] if slow else []))
            seen.add(start)
    return cases


@pytest.mark.parametrize("row", rows(LINES), ids=str)
def test_a_bad_value_ends_with_one_sentence(
    row: Row,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    check_command_refused([*row.name.split(), str(row.given)], row.says, folder, monkeypatch, capsys)
    tried("bad inputs", 1)


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_option_of_every_command_has_a_row() -> None:
    starts = [start.split() for start, _, _ in LINES]
    free = {"--title"}  # any text
    for path, command in commands():
        if path == "train":
            continue
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert any(" ".join(start) in (path, f"{path} good.json", f"{path} bam-tiny") for start in starts), (
                    path,
                    parameter.name,
                )
            elif not getattr(parameter, "is_flag", False) and parameter.opts[0] not in free:
                of_command = [start for start in starts if " ".join(start).startswith(f"{path} ")]
                assert any(start[-1] == parameter.opts[0] for start in of_command), (path, parameter.opts)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] if at > 1 else []) for at, row in enumerate(EXECUTABLE)], ids=str
)
def test_the_executable_ends_with_one_sentence(row: Row, folder: Path, tried: Callable[[str, int], None]) -> None:
    before = sorted(folder.rglob("*"))
    command = [sys.executable, "-m", "bayesattn.cli", *row.name.split(), str(row.given)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("bayesattn: ")
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) <= LONGEST + len("bayesattn: \n")
    assert row.says in done.stderr
    assert sorted(folder.rglob("*")) == before
    tried("bad inputs", 1)
