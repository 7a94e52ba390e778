"""Time and memory of functions, measured so that the comparison is fair: in turn, and each alone."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Work = Callable[[], object]

# A function is timed this often, but no longer than this many seconds once it has had the least number of rounds.
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
SECONDS = 5.0
# A first call that takes longer than this is not for warming up: it is the measurement.
LONG = 10.0
TIMING = "median of 3 to 15 rounds in turn after one to warm up; a single one where it takes over 10 s"


def seconds_in_turn(work: Mapping[str, Work], most_rounds: int = MOST_ROUNDS) -> dict[str, float]:
    """Median seconds of each function. They take turns, so that a slow moment of the machine meets all of them."""
    first = {name: _seconds(function) for name, function in work.items()}
    times: dict[str, list[float]] = {name: [] for name in work if first[name] <= LONG}
    for _ in range(most_rounds):
        for name, rounds in times.items():
            if len(rounds) < LEAST_ROUNDS or sum(rounds) <= SECONDS:
                rounds.append(_seconds(work[name]))
    return first | {name: statistics.median(rounds) for name, rounds in times.items()}


def _seconds(function: Work) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def physical_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes_of(module: str, *arguments: str) -> int:
    """Run `python -m module arguments…`, which prints what `peak_bytes` returns, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise RuntimeError(f"measuring the memory of {' '.join(arguments)} failed: {reason}")
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak_bytes(work: Work) -> int:
    """How far `work` drives this process's memory above what it holds now."""
    before = _resident()
    reset = _reset_peak()
    work()
    peak = _peak() if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT
    return max(0, peak - before)


_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def _reset_peak() -> bool:
    # On Linux ru_maxrss is inherited from the parent process; the kernel's high-water mark is our own and can be reset.
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
