"""Every test runs with uninitialised memory full of NaN, so that reading what was never written shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from bayesattn.attention.kernels import buffers

TRIED = "tried "

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which fills torch.empty with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    buffers.clear()  # which an earlier test has filled
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Call it with what a test tried and how often, such as `tried("bad inputs", 1)`; the summary adds them up."""
    return lambda what, count: record_property(TRIED + what, count)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, count in report.user_properties:
                if report.when == "call" and name.startswith(TRIED):
                    counts[name.removeprefix(TRIED), outcome] += count
    for what in dict.fromkeys(what for what, _ in counts):
        passed, failed = counts[what, "passed"], counts[what, "failed"]
        terminalreporter.write_line(f"{what}: {passed + failed:,} tried, {failed:,} in tests that failed")
