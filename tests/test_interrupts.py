"""Ctrl-C and SIGTERM end a command with one line, and with what it has finished kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bayesattn import interrupts
from bayesattn.cli import main
from bayesattn.cli.errors import run
from bayesattn.interrupts import Interrupted, deferred, interruptible, keeps
from bayesattn.studies import runner
from bayesattn.studies.results import read_results, write_results

SIGNALS = [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]


@pytest.fixture(autouse=True)
def default_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell leaves to a command; a test run in the background has SIGINT ignored."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code", "name"), SIGNALS)
def test_a_signal_ends_a_command_with_its_exit_code(number: int, code: int, name: str) -> None:
    with pytest.raises(Interrupted) as stopped, interruptible():
        signal.raise_signal(number)
    assert stopped.value.exit_code == code
    assert str(stopped.value) == f"stopped by {name}; run the same command again"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_at_once_are_one() -> None:
    handled = 0
    with interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        except Interrupted:
            signal.raise_signal(signal.SIGTERM)
            handled += 1
    assert handled == 1


def test_a_signal_waits_for_the_end_and_a_later_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def run() -> None:
        with interruptible(), deferred() as waiting:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                steps.append(waiting())

    with pytest.raises(Interrupted):
        run()
    assert steps == [signal.SIGTERM] * 2
    monkeypatch.setattr(interrupts, "AT_ONCE", -1.0)
    with pytest.raises(Interrupted):
        run()
    assert steps == [signal.SIGTERM] * 3


def test_without_a_command_ctrl_c_is_that_of_python() -> None:
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible(), deferred() as waiting:
        signal.raise_signal(signal.SIGINT)
        assert not waiting()


def test_a_thread_leaves_signals_alone() -> None:
    seen = []

    def run() -> None:
        with interruptible(), deferred() as waiting:
            seen.append((waiting(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(0, signal.default_int_handler)]


def test_an_interruption_says_what_is_kept_also_if_a_library_failed_on_its_way_out() -> None:
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("a file was not closed")

    with pytest.raises(Interrupted) as stopped, interruptible(), keeps(lambda: "all of it is kept"):
        library()
    assert str(stopped.value) == "stopped by Ctrl-C; all of it is kept"


@pytest.mark.parametrize("module", ["typer", "torch"])
@pytest.mark.parametrize(("number", "code", "name"), SIGNALS)
def test_a_signal_while_modules_are_imported_ends_quietly(
    number: int, code: int, name: str, module: str, tmp_path: Path
) -> None:
    # In the place of the module, one that waits.
    (tmp_path / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", "import bayesattn_cli; bayesattn_cli.main()", "priors", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    line = f"bayesattn: stopped by {name}; run the same command again\n" if module == "torch" else ""
    assert process.communicate() == ("", line)
    assert process.returncode == code


@pytest.mark.parametrize(
    ("number", "command", "name"),
    [
        (signal.SIGINT, "passkey bam-tiny --lengths 128,192 --trials 2", "passkey"),
        (signal.SIGTERM, "needle bam-tiny --task single --lengths 512,600 --trials 1", "needle"),
        (signal.SIGINT, "perplexity bam-tiny --lengths 0,128 --windows 2", "perplexity"),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_an_evaluation_that_is_stopped_keeps_its_results(
    number: int,
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / f"{name}.json"

    def stopped(path: Path, kind: str, content: dict[str, Any]) -> None:
        write_results(path, kind, content)
        signal.raise_signal(number)

    monkeypatch.setattr(runner, "write_results", stopped)
    monkeypatch.setattr(sys, "argv", ["bayesattn", "eval", *command.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + number
    sender = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    line = f"bayesattn: stopped by {sender}; the results so far are in {file}, and the same command resumes"
    assert capsys.readouterr().err.splitlines() == [line]
    assert read_results(file)
    assert not (tmp_path / f"{name}.json.partial").exists()


def test_a_full_disk_names_the_file_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "passkey.json.partial").symlink_to("/dev/full")  # every write to it fails as on a full disk
    command = ["bayesattn", "eval", "passkey", "bam-tiny", "--lengths", "128", "--trials", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    file = tmp_path / "passkey.json"
    assert f"bayesattn: {file} cannot be written: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_progress_bar_ends_before_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tqdm import tqdm

    bars = []

    def work(**_: Any) -> None:
        bars.append(tqdm(total=10, file=sys.stderr))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("bayesattn.cli.errors.sys.argv", ["bayesattn"])
    with pytest.raises(SystemExit) as ended:
        run(work)  # type: ignore[arg-type]
    assert ended.value.code == 130
    *_, before, line, after = capsys.readouterr().err.split("\n")
    assert "0/10" in before
    assert line.startswith("bayesattn: stopped by Ctrl-C")
    assert after == ""


def test_what_was_half_made_does_not_complain(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from bayesattn.cli.errors import run\n"
        "class Bar:\n"
        "    def __init__(self): os.kill(os.getpid(), signal.SIGINT); self.pos = 0\n"
        "    def __del__(self): self.pos\n"
        "run(lambda **_: Bar())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.returncode == 130
    assert process.stderr.splitlines() == ["bayesattn: stopped by Ctrl-C; run the same command again"]
