"""Another process of a benchmark, which repeats its work while it is told to.

The two sides speak by pipes. So the other process ends with this one, however it ends: its pipe is closed then. It ends
by itself as well, after a number of seconds.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from tempfile import TemporaryFile
from typing import IO


class Companion:
    """The other process; it rests until `start`."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process, self._errors = process, errors
        self._answer()  # it is ready

    def start(self) -> None:
        self._tell("start")

    def stop(self) -> float:
        """Rest again; returns how often a second the work was done since `start`."""
        self._tell("stop")
        calls, seconds = json.loads(self._answer())
        return float(calls / seconds)

    def _tell(self, word: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            print(word, file=pipe, flush=True)
        except BrokenPipeError:
            self._fail()

    def _answer(self) -> str:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self._fail()
        return line

    def _fail(self) -> None:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        reason = "it took too long" if code == -signal.SIGALRM else lines[-1] if lines else f"code {code}"
        raise RuntimeError(f"another process of the benchmark ended: {reason}")


@contextmanager
def companion(module: str, *arguments: str) -> Iterator[Companion]:
    """`python -m module arguments…`, which must call `repeat`; it ends with the block.

    It has a session of its own, so that a Ctrl-C comes to this process alone.
    """
    command = [sys.executable, "-m", module, *arguments]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        try:
            yield Companion(process, errors)
        finally:
            process.kill()


def repeat(prepare: Callable[[], Callable[[], object]], most_seconds: int) -> None:
    """The side of the other process: repeat the work that `prepare` returns whenever it is told to."""
    signal.alarm(most_seconds)  # ends the process, whatever it does then
    work = prepare()
    work()  # to warm up
    print("ready", flush=True)
    words = FileIO(sys.stdin.fileno(), closefd=False)  # without a buffer: select does not see what that holds
    while words.readline():
        calls, begin = 0, time.perf_counter()
        while not calls or not select.select([words], [], [], 0)[0]:
            work()
            calls += 1
        seconds = time.perf_counter() - begin
        if words.readline():
            print(json.dumps([calls, seconds]), flush=True)
