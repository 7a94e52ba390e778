"""What benchmarks share: their settings, and rows that are measured length by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from bayesattn.schemas import Anything
from bayesattn.studies import study
from bayesattn.studies.options import Budget
from bayesattn.studies.study import Progress, Result

T = TypeVar("T")
R = TypeVar("R", bound="Measured")

Lengths = Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of tokens.")]
Memory = Annotated[bool, typer.Option(help="Measure peak memory, each method in its own process.")]


@dataclass(frozen=True, kw_only=True)
class Settings(study.Settings):
    """Settings of all benchmarks."""

    budget: Budget = None
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the random inputs.")] = 0


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """`settings` are sizes, seed, software and hardware."""

    settings: dict[str, Anything]


def stopped(progress: Progress[R], settings: dict[str, Any]) -> R | None:
    """What was measured before an interruption. A whole result is measured anew, and so is one of other settings."""
    before = progress.earlier()
    return before if before is not None and before.partial and before.settings == settings else None


def by_length(
    progress: Progress[Any],
    what: str,
    lengths: Sequence[int],
    done: Sequence[Any],
    measure: Callable[[Sequence[int]], Iterator[Sequence[T]]],
) -> Iterator[list[T]]:
    """Rows so far, from those that are `done`; lengths that the budget has no time for are left out."""
    rows, known = list(done), {row.tokens for row in done}
    missing = [length for length in lengths if length not in known]
    progress.step(what, len(known), len(lengths))
    for part in measure(missing):
        rows += part
        progress.step(what, len({row.tokens for row in rows}), len(lengths))
        yield rows
        if progress.left() <= 0:
            return
