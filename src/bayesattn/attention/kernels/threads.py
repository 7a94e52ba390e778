"""Share a list of tasks among threads, each of which computes alone.

torch shares every operator among its threads, which meet at its end. A pass over many tiles meets thousands of times.
On a machine that does other things too, each meeting waits until the scheduler has given every thread its turn. So
tasks are shared instead: each thread of ours computes whole ones, and all meet once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from bayesattn.attention.problem import Problem

Task = TypeVar("Task")
Result = TypeVar("Result")

# Fewer logits are soon computed. Our threads would then only wait for those of torch, which spin for milliseconds.
LEAST_LOGITS = 2**22
# Python runs one thread at a time between operators, so more would wait for each other.
MOST_THREADS = 16


def one_thread_each(problem: Problem) -> bool:
    """Whether to compute each task of this problem in a thread of its own."""
    logits = len(problem.q) * problem.q.shape[1] * problem.num_queries * problem.num_keys
    return problem.q.is_cpu and logits >= LEAST_LOGITS and _set_mkl_threads() is not None


def share(function: Callable[[Task], Result], tasks: Sequence[Task], one_thread_each: bool) -> list[Result]:
    """The results of the tasks. Threads take them in order, one at a time, if each is to have a thread of its own."""
    size = min(torch.get_num_threads(), MOST_THREADS)
    if not one_thread_each or len(tasks) < 2 or size < 2:
        return [function(task) for task in tasks]
    numbers, results, stopped = count(), dict[int, Result](), threading.Event()
    is_inference = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            try:
                while not stopped.is_set() and (number := next(numbers)) < len(tasks):
                    results[number] = function(tasks[number])
            except BaseException:
                stopped.set()
                raise

    team = _team(size)
    futures = [team.submit(work) for _ in range(min(size, len(tasks)))]
    try:
        wait(futures)
    except BaseException:  # Ctrl-C: nobody may write to our tensors once we are gone
        stopped.set()
        wait(futures)
        raise
    for future in futures:
        future.result()
    return [results[number] for number in range(len(tasks))]


@cache
def _team(size: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    ready = threading.Barrier(size + 1)
    team = ThreadPoolExecutor(size, "bayesattn", _compute_alone, (max(1, threads // size),))
    for _ in range(size):
        team.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)  # which the threads have also set for those to come
    return team


def _compute_alone(threads: int) -> None:
    """Let operators that this thread calls run in so many threads of torch."""
    torch.get_num_threads()  # a thread's first question takes over what others have
    torch.set_num_threads(threads)
    set_mkl_threads = _set_mkl_threads()
    assert set_mkl_threads is not None
    set_mkl_threads(threads)


@cache
def _set_mkl_threads() -> Callable[[int], object] | None:
    """MKL's function for the calling thread alone; None where torch computes without MKL.

    `torch.set_num_threads` sets MKL's threads for all threads of the process.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_team.cache_clear)  # a child has none of the threads
