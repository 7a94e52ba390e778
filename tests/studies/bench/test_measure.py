from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bayesattn.studies.bench import measure


class Clock:
    """Time passes only while work is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        """A function whose calls take these seconds, the last of them again and again."""
        times = list(seconds)

        def work() -> None:
            self.calls.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return work


def test_functions_are_timed_in_turn_and_the_first_call_is_left_out() -> None:
    clock = Clock()
    work = {"a": clock.work("a", 9.0, 1.0, 2.0, 3.0), "b": clock.work("b", 0.5)}
    seconds = measure.seconds_in_turn(work, most_rounds=3, clock=clock)
    assert clock.calls == ["a", "b"] * 4
    assert seconds == {"a": 2.0, "b": 0.5}


def test_preparations_come_before_each_call_and_are_not_timed() -> None:
    clock = Clock()
    work, prepare = {"a": clock.work("a", 2.0), "b": clock.work("b", 1.0)}, {"a": clock.work("prepare a", 5.0)}
    seconds = measure.seconds_in_turn(work, most_rounds=2, prepare=prepare, clock=clock)
    assert clock.calls == ["prepare a", "a", "b"] * 3
    assert seconds == {"a": 2.0, "b": 1.0}


def test_a_long_first_call_is_the_measurement() -> None:
    clock = Clock()
    seconds = measure.seconds_in_turn({"long": clock.work("long", 11.0, 1.0)}, clock=clock)
    assert (seconds, clock.calls) == ({"long": 11.0}, ["long"])


@pytest.mark.parametrize(("seconds", "rounds"), [(4.0, 3), (1.5, 4), (0.1, 15)])
def test_slow_functions_get_fewer_rounds(seconds: float, rounds: int) -> None:
    clock = Clock()
    measure.seconds_in_turn({"work": clock.work("work", seconds)}, clock=clock)
    assert len(clock.calls) == 1 + rounds


def test_peak_memory_counts_what_is_allocated_and_freed() -> None:
    assert measure.peak_bytes(lambda: torch.ones(50_000_000).sum()) == pytest.approx(200e6, rel=0.1)
    assert measure.peak_bytes(lambda: None) < 20e6


def test_a_process_that_fails_to_measure_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="measuring the memory of 99 64 0 failed: IndexError"):
        measure.peak_bytes_of("bayesattn.studies.bench.attention.measure", "99", "64", "0")
