"""Trials of a retrieval task whose results are kept after every batch: what pass keys and needles share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bayesattn.evaluation.cells import Cell
from bayesattn.schemas import Anything, Tokens
from bayesattn.studies.study import Progress, Result

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader
    from bayesattn.evaluation.trials import Clock, Task


@dataclass(frozen=True, kw_only=True)
class Retrieval(Result):
    """Trials by length. `extent` says how many were wanted."""

    model: str
    train_length: Tokens
    settings: Anything
    cells: list[Cell]
    fingerprint: str | None = None
    extent: Anything | None = None
    dense: Anything | None = None


def identity(reader: Reader) -> dict[str, Any]:
    """What results of one model have in common."""
    return {"model": reader.name, "fingerprint": reader.fingerprint, "train_length": reader.train_length}


def continued(earlier: Retrieval | None, extent: Mapping[str, Any], trials: int) -> list[Cell]:
    """Cells to go on from; with another extent, lengths that were stopped or left out have another chance."""
    if earlier is None:
        return []
    if earlier.extent == extent:
        return earlier.cells
    return [replace(cell, planned=max(trials, cell.trials), note="") for cell in earlier.cells if cell.trials]


def run_trials(
    progress: Progress[Any],
    reader: Reader,
    task: Task,
    lengths: Sequence[int],
    trials: int,
    done: Sequence[Cell],
    *,
    budget: float | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> Iterator[list[Cell]]:
    """`evaluate`; yields all cells, from the shortest length to the longest, after every batch."""
    from bayesattn.evaluation.trials import evaluate

    cells = {cell.length: cell for cell in done}
    options |= {} if clock is None else {"clock": clock}
    for cell in evaluate(reader, task, lengths, trials, done=done, budget=budget, **options):
        cells[cell.length] = cell
        progress.step(f"{cell.length:,} tokens", cell.trials, cell.planned)
        yield [cells[length] for length in sorted(cells)]
