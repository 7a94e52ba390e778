"""What benchmarks share: their settings, and rows that are measured part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import typer

from bayesattn.schemas import Anything, number
from bayesattn.studies import study
from bayesattn.studies.options import Budget
from bayesattn.studies.study import Progress, Result

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R", bound="Measured")

Lengths = Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of tokens.")]
Memory = Annotated[bool, typer.Option(help="Measure peak memory, each method in its own process.")]

# Of a row.
Phase = Literal["forward", "forward + backward"]
FORWARD: Phase = "forward"
TRAINING: Phase = "forward + backward"
Positive = Annotated[float, number(1e-300)]


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


def by_part(
    progress: Progress[Any],
    what: str,
    parts: Sequence[P],
    done: Sequence[T],
    part_of: Callable[[T], P],
    measure: Callable[[Sequence[P]], Iterator[Sequence[T]]],
) -> Iterator[list[T]]:
    """Rows so far, from those that are `done`; parts that the budget has no time for are left out."""
    rows, known = list(done), {part_of(row) for row in done}
    progress.step(what, len(known), len(parts))
    missing = [part for part in parts if part not in known]
    for measured in measure(missing) if missing else ():
        rows += measured
        progress.step(what, len({part_of(row) for row in rows}), len(parts))
        yield rows
        if progress.left() <= 0:
            return


def by_length(
    progress: Progress[Any],
    what: str,
    lengths: Sequence[int],
    done: Sequence[Any],
    measure: Callable[[Sequence[int]], Iterator[Sequence[T]]],
) -> Iterator[list[T]]:
    """`by_part` where the parts are numbers of tokens."""
    return by_part(progress, what, lengths, done, lambda row: row.tokens, measure)
