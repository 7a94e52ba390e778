"""What a prior does to convergence: it limits the number of effective tokens, and so how far errors can fall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bayesattn.schemas import Amount, Positive, Row, Tokens, Wrong, at_least
from bayesattn.studies.convergence import replicates
from bayesattn.studies.options import finite
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Settings(replicates.Settings):
    """Show where a prior stops the error from falling.

    The error that remains is predicted from effective tokens of the prior, and measured.

    Example: bayesattn convergence prior --scale 2
    """

    file: ClassVar[str] = "convergence-prior"
    pictures: ClassVar[tuple[str, ...]] = ("convergence-prior",)

    scale: Annotated[
        float,
        typer.Option(min=0, max=1000, callback=finite, help="Scale of the logits; the table shows their horizon."),
    ] = 5.0


@dataclass(frozen=True)
class Floor(Row):
    """One prior: its effective tokens, the measured errors and the predicted errors at each length.

    `floored` means that the error has stopped falling: the last nine tenths of the tokens lower it by less than 10%.
    """

    derived: ClassVar[tuple[str, ...]] = ("ratio",)

    prior: str
    floored: bool
    lengths: Annotated[list[Tokens], at_least(1)]
    effective: list[Amount]
    measured: list[Amount]
    measured_se: list[Amount]
    predicted: list[Positive]

    @property
    def ratio(self) -> Amount:
        """Measured error over predicted error, at the longest length."""
        return self.measured[-1] / self.predicted[-1]

    @staticmethod
    def fits(row: Mapping[str, Any]) -> Wrong | None:
        """There is a value for each length."""
        for name in ("effective", "measured", "measured_se", "predicted"):
            if len(row[name]) != len(row["lengths"]):
                return f".{name}", f"has {len(row[name])} values for {len(row['lengths'])} lengths"
        return None


@dataclass(frozen=True, kw_only=True)
class Floors(replicates.Replicated):
    """Measured and predicted errors by prior. Results of earlier versions have no horizon."""

    scale: Amount
    rows: Annotated[list[Floor], at_least(1)]
    horizon: Amount | None = None


def run(settings: Settings, progress: Progress[Floors]) -> Floors:
    from bayesattn.studies.convergence.laws import Head, gaussian
    from bayesattn.studies.convergence.prior import measure

    law, priors, scale, seed = gaussian(), measure.families(), settings.scale, settings.seed
    head = Head.random(law.dimension, seed)
    measure.typical_constant(law, head, scale)  # raises before the draws, not after them
    grid = settings.grid("10-5000" if settings.quick else "10-20000", 12)
    total = settings.draws(40, 200)

    def result(squared: Tensor) -> Floors:
        rows = measure.rows(law, priors, scale, grid, squared, seed)
        return Floors(scale=scale, replicates=len(squared), seed=seed, rows=rows, horizon=head.horizon(law, scale))

    return replicates.collect(
        progress,
        {"scale": scale, "lengths": grid, "seed": seed},
        lambda first: measure.sweep(law, priors, scale, grid, total, seed, first),
        total,
        result,
    )


STUDY = Study(kind="convergence-prior", commands={"convergence prior": Settings}, run=run, result=Floors, place=75)
