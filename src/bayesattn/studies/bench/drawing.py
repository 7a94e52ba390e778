"""What tables of benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Checked(Protocol):
    """A row with its largest error."""

    @property
    def error(self) -> float | None: ...


def largest_error(rows: Sequence[Checked]) -> str | None:
    """A line below a table."""
    errors = [row.error for row in rows if row.error is not None]
    return f"largest error against the float64 reference in this run: {max(errors):.0e}" if errors else None
