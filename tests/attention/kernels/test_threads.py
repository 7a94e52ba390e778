"""Threads that compute alone give what one thread gives, and leave torch's own threads as they were."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.attention.kernels import blockwise, sdpa, threads
from tests.attention.cases import random_case

needs_mkl = pytest.mark.skipif(threads._set_mkl_threads() is None, reason="torch computes without MKL")


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(threads, "LEAST_LOGITS", 1)
    yield
    torch.set_num_threads(before)


@needs_mkl
def test_results_come_in_the_order_of_the_tasks() -> None:
    names = set()

    def task(number: int) -> int:
        names.add(threading.current_thread().name)
        return number * number

    assert threads.share(task, range(200), True) == [i * i for i in range(200)]
    assert threading.current_thread().name not in names


@needs_mkl
def test_each_thread_computes_alone_and_torch_keeps_its_threads() -> None:
    assert set(threads.share(lambda _: torch.get_num_threads(), range(20), True)) == {1}
    assert torch.get_num_threads() == 3
    new = []
    thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert new == [3]


@needs_mkl
def test_an_error_reaches_the_caller_after_all_threads_have_stopped() -> None:
    running: list[int] = []

    def task(number: int) -> None:
        running.append(number)
        if number == 5:
            raise ValueError("five")
        running.remove(number)

    with pytest.raises(ValueError, match="five"):
        threads.share(task, range(1000), True)
    assert running == [5]


def _share_in_child(queue: Any) -> None:
    queue.put(threads.share(lambda i: (i, torch.get_num_threads()), range(10), True))


@needs_mkl
def test_a_forked_process_has_threads_of_its_own() -> None:
    threads.share(lambda i: i, range(10), True)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_share_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [(i, 1) for i in range(10)]
    child.join()


@needs_mkl
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_heads": 2}, {"documents": True}, {"scaled": "batch", "kv_heads": 1}, {"scaled": None, "causal": False}],
    ids=str,
)
def test_threads_change_no_result(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(random_case(67, batch=3, hidden=0.1, **settings).problem(), needs_lse=True)
    grad_out, grad_lse = torch.randn_like(problem.q), torch.randn(problem.q.shape[:3], dtype=torch.float64)
    tiles = blockwise.TileLimits(elements=3000, elements_alone=3000, most_rows=16)

    def results() -> list[Any]:
        gradients = blockwise.backward(problem, grad_out, grad_lse, tiles=tiles)
        return [*blockwise.forward(problem, tiles), *sdpa.forward(problem), *gradients]

    shared = results()
    monkeypatch.setattr(threads, "LEAST_LOGITS", 2**60)
    for ours, alone in zip(shared, results(), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-13, atol=1e-13)


@needs_mkl
def test_threads_follow_inference_mode() -> None:
    case = random_case(40)
    with torch.inference_mode():
        inferred = case.attend("blockwise")
    assert inferred.is_inference()
    q = case.q.clone().requires_grad_()
    ba.bayesian_attention(q, case.k, case.v, case.table, implementation="blockwise").sum().backward()
    assert q.grad is not None
