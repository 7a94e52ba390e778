"""What a command says about its results when it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bayesattn.interrupts import keeps


@contextmanager
def saving_to(*files: Path) -> Iterator[None]:
    """Within it, results are saved in the files as they come, and the same command resumes."""

    def kept() -> str:
        there = [str(file) for file in files if file.exists()]
        if not there:
            return "there are no results yet, and the same command starts again"
        return f"the results so far are in {', '.join(there[-1:])}, and the same command resumes"

    with keeps(kept):
        yield
