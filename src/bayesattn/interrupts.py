"""Ctrl-C and SIGTERM: a command ends with what it has finished, one line about it, and exit code 130 or 143."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals are one: a terminal, a launcher and `timeout` may all pass on the same Ctrl-C.
AT_ONCE = 1.0


class Interrupted(BaseException):
    """A signal ends the command. `kept` says what is kept and how to go on.

    It is no KeyboardInterrupt, which the library of the command line would catch.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.kept = number, "run the same command again"

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {'Ctrl-C' if self.number == signal.SIGINT else 'SIGTERM'}; {self.kept}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, the first signal raises Interrupted, and another one a second later ends the process at once."""
    first: list[float] = []

    def handle(number: int, _: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            raise Interrupted(number)
        if time.monotonic() - first[0] > AT_ONCE:
            os._exit(128 + number)

    with _handled(handle):
        yield


@contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Within it, the first signal waits until the end, and another one a second later does not.

    Yields a function that returns the number of the signal that waits, 0 for none.
    """
    waiting: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not waiting:
            waiting.append((number, time.monotonic()))
        elif time.monotonic() - waiting[0][1] > AT_ONCE:
            deliver(number, frame)

    def deliver(number: int, frame: FrameType | None) -> None:
        waiting.clear()
        before = handlers.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)

    with _handled(handle) as handlers:
        try:
            yield lambda: waiting[0][0] if waiting else 0
        finally:
            if waiting:
                deliver(waiting[0][0], None)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Handle the signals that are not ignored; yields their handlers before. Only the main thread may do this."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield before
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def keeps(sentence: Callable[[], str]) -> Iterator[None]:
    """Say with an interruption what is kept."""
    try:
        yield
    except BaseException as problem:
        stop: BaseException | None = problem
        while stop is not None and not isinstance(stop, Interrupted):
            stop = stop.__context__  # a library may have failed on its way out
        if stop is None:
            raise
        stop.kept = sentence()
        raise stop from None
