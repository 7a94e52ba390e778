"""Independent draws of a convergence study: kept as they come, within a budget, and continued after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bayesattn.errors import UserError
from bayesattn.schemas import Tokens, Whole, Wrong
from bayesattn.studies import study
from bayesattn.studies.options import Budget, Seed, not_empty, parse_grid
from bayesattn.studies.study import Progress, Result

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R", bound="Replicated")

Lengths = Annotated[
    str | None, typer.Option(callback=not_empty, metavar="N-N", help="Shortest and longest number of tokens.")
]
Points = Annotated[
    int | None,
    typer.Option(min=3, max=1000, help="Number of lengths from the shortest to the longest, in a geometric series."),
]
Replicates = Annotated[int | None, typer.Option(min=1, max=10**6, help="Number of independent draws of the tokens.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use fewer and shorter draws; takes less than a minute.")]
Dimension = Annotated[int, typer.Option(help="Dimension of the tokens and queries.")]


@dataclass(frozen=True, kw_only=True)
class Settings(study.Settings):
    """Settings of all studies of convergence."""

    quick: Quick = False
    lengths: Lengths = None
    points: Points = None
    replicates: Replicates = None
    budget: Budget = None
    seed: Seed = 0

    def grid(self, lengths: str, points: int) -> list[int]:
        """Numbers of tokens, by default these."""
        return parse_grid(self.lengths or lengths, self.points or points)

    def draws(self, quick: int, full: int) -> int:
        """Number of draws, by default one of these."""
        return self.replicates if self.replicates is not None else quick if self.quick else full


@dataclass(frozen=True, kw_only=True)
class Replicated(Result):
    """What every study of convergence has in its results."""

    replicates: Tokens
    seed: Whole


def collect(
    progress: Progress[R],
    settings: dict[str, Any],
    sweep: Callable[[int], Iterator[Tensor]],
    total: int,
    result: Callable[[Tensor], R],
) -> R:
    """The result of all draws, or of those that the budget allows, but of as many as a fit needs.

    Args:
        settings: what a draw depends on; draws of an interrupted run with the same settings are not made again.
        sweep: makes the draws from a number on.
        total: how many draws there are to be.
        result: the result of a stack of draws.
    """
    import torch

    from bayesattn.studies.convergence.fits import LEAST_REPLICATES, check_replicates

    before = progress.draws(settings)
    draws: list[Tensor] = [] if before is None else list(torch.from_numpy(before))[:total]
    progress.step("drawing tokens", len(draws), total)
    for draw in sweep(len(draws)):
        draws.append(draw)
        progress.step("drawing tokens", len(draws), total)
        out_of_time = progress.left() <= 0 and len(draws) >= LEAST_REPLICATES
        if len(draws) < total and (out_of_time or progress.is_due()):
            progress.keep_draws(torch.stack(draws).numpy())
            with suppress(UserError):  # a fit may need more draws
                check_replicates(len(draws))
                progress.keep(result(torch.stack(draws)))
        if out_of_time:
            break
    return result(torch.stack(draws))


def title_end(result: Replicated) -> str:
    """How a title says how it was measured."""
    return f"{result.replicates} draws, seed {result.seed}"


def rows_fit(*names: str) -> Callable[[Mapping[str, Any]], Wrong | None]:
    """A check that these lists of every row have a value for each length."""

    def check(content: Mapping[str, Any]) -> Wrong | None:
        for place, row in enumerate(content["rows"]):
            for name in names:
                if len(row[name]) != len(content["lengths"]):
                    values = f"{len(row[name])} values for {len(content['lengths'])} lengths"
                    return f".rows[{place}].{name}", f"has {values}"
        return None

    return check
