from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bayesattn.studies.bench.companion import Companion, companion

MODULE = """
import time
from bayesattn.studies.bench.companion import repeat

def work():
    {work}

repeat(lambda: work, {most_seconds})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a module for the other process, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def write(work: str = "time.sleep(0.01)", most_seconds: int = 60) -> str:
        (tmp_path / "other.py").write_text(MODULE.format(work=work, most_seconds=most_seconds))
        return "other"

    return write


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_it_works_only_between_start_and_stop(module: Callable[..., str], tmp_path: Path) -> None:
    done = tmp_path / "done"
    with companion(module(f"time.sleep(0.01); open({str(done)!r}, 'a').write('x')")) as other:
        for _ in range(2):
            before = done.stat().st_size
            other.start()
            assert wait_for(lambda before=before: done.stat().st_size > before + 1)  # type: ignore[misc]
            assert 0 < other.stop() <= 100
        before = done.stat().st_size
        time.sleep(0.1)
        assert done.stat().st_size == before


def test_it_works_at_least_once_however_soon_it_is_stopped(module: Callable[..., str]) -> None:
    with companion(module()) as other:
        for _ in range(5):
            other.start()
            assert other.stop() > 0
        other._tell("start\nstop")  # both are there before the first is read
        assert float(json.loads(other._answer())[0]) >= 1


def test_it_ends_with_the_block_also_after_an_error(module: Callable[..., str]) -> None:
    others: list[Companion] = []

    def work() -> None:
        with companion(module()) as other:
            others.append(other)
            other.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert others[0]._process.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_the_parent_is_killed(module: Callable[..., str], number: signal.Signals) -> None:
    parent = (
        "from bayesattn.studies.bench.companion import companion\n"
        f"with companion({module()!r}) as other:\n"
        "    other.start()\n"
        "    print(other._process.pid, flush=True)\n"
        "    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_running(child)
        process.send_signal(number)
        process.wait()
    assert wait_for(lambda: not is_running(child))


def test_it_ends_by_itself_after_its_time(module: Callable[..., str]) -> None:
    def work() -> None:
        with companion(module(most_seconds=1)) as other:
            while True:
                other.start()
                other.stop()

    with pytest.raises(RuntimeError, match="it took too long"):
        work()


def test_an_error_in_the_other_process_is_told(module: Callable[..., str]) -> None:
    with (
        pytest.raises(RuntimeError, match="ended: ValueError: no text"),
        companion(module("raise ValueError('no text')")),
    ):
        pass
