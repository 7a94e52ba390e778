"""Time and memory of functions. Times are measured in turn, memory in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Work = Callable[[], object]

# Rounds of timing. After the least number of rounds, a function stops once its rounds took this many seconds.
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
SECONDS = 5.0
# The first call warms up. If it takes longer than this many seconds, it is the measurement.
LONGEST_WARM_UP = 10.0
TIMING = "median of {} to {} rounds in turn after one to warm up; a single one where it takes over {:g} s"
# Tokens at which the memory of a method is measured if more tokens may not fit.
PROBE = 1024
# How threads wait for each other. Beside other processes it decides more than anything else.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def seconds_in_turn(
    work: Mapping[str, Work],
    most_rounds: int = MOST_ROUNDS,
    *,
    prepare: Mapping[str, Work] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each function. They run in turn, so a slow moment of the machine affects all of them.

    `prepare` has functions that are called before each call of the function with the same name, and are not timed.
    """
    before = prepare or {}

    def seconds(name: str) -> float:
        if name in before:
            before[name]()
        return _seconds(work[name], clock)

    first = {name: seconds(name) for name in work}
    times: dict[str, list[float]] = {name: [] for name in work if first[name] <= LONGEST_WARM_UP}
    for _ in range(most_rounds):
        for name, rounds in times.items():
            if len(rounds) < LEAST_ROUNDS or sum(rounds) <= SECONDS:
                rounds.append(seconds(name))
    return first | {name: statistics.median(rounds) for name, rounds in times.items()}


def _seconds(function: Work, clock: Callable[[], float]) -> float:
    begin = clock()
    function()
    return clock() - begin


def environment(most_rounds: int = MOST_ROUNDS) -> dict[str, object]:
    """Software and hardware of a measurement, and how it is timed."""
    return {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "waiting": {name: os.environ.get(name) for name in WAITING},
        "timing": TIMING.format(LEAST_ROUNDS, most_rounds, LONGEST_WARM_UP),
    }


def peak_bytes_of(module: str, *arguments: str) -> int:
    """The result of `peak_bytes` that `python -m module arguments…` prints, in a process of its own."""
    process = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if process.returncode != 0:
        reason = process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"code {process.returncode}"
        raise RuntimeError(f"measuring the memory of {' '.join(arguments)} failed: {reason}")
    return int(json.loads(process.stdout.splitlines()[-1]))


def bytes_needed(bound: int, room: float, tokens: int, peak: Callable[[int], int] | None) -> int:
    """Bytes that a method whose memory grows with the square of the length needs for so many tokens.

    That is `bound`, rounded up by hand, if it fits into the room. If not, it is decided by what was measured: the
    `peak` of fewer tokens, extrapolated; or `bound` again where nothing is to be measured.
    """
    if bound <= room or peak is None:
        return bound
    probe = min(tokens, PROBE)
    return int(peak(probe) * (tokens / probe) ** 2)


def peak_bytes(work: Work) -> int:
    """Peak memory of this process while `work` runs, above the memory it holds before."""
    before = _resident()
    reset = _reset_peak()
    work()
    peak = _peak() if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT
    return max(0, peak - before)


_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def _reset_peak() -> bool:
    # On Linux ru_maxrss is inherited from the parent process. The kernel's high-water mark is our own and can be reset.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    return _status("VmHWM")


def _resident() -> int:
    try:
        return _status("VmRSS")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
