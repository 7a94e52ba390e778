"""Uniform convergence: the largest error of attention over a ball of queries, and how it grows with the radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from bayesattn.schemas import Amount, Number, Row, Tokens, Whole, at_least
from bayesattn.studies.convergence import replicates
from bayesattn.studies.options import parse_numbers
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Settings(replicates.Settings):
    """Find the largest error of attention over a ball of queries.

    Shows its rate in n, and how its constant grows with the radius. A gradient search from many starting points finds
    the largest error. It is a lower bound, close in few dimensions.

    Example: bayesattn convergence uniform --law sphere --radii 2,4,8,16
    """

    file: ClassVar[str] = "convergence-uniform"
    pictures: ClassVar[tuple[str, ...]] = ("convergence-uniform",)

    law: Annotated[Literal["gaussian", "sphere", "mixture"], typer.Option(help="The law of the tokens.")] = "gaussian"
    radii: Annotated[str, typer.Option(metavar="R,R,…", help="Radii of the ball of queries.")] = "0.5,1,1.5,2,2.5,3"
    dimension: replicates.Dimension = 8


@dataclass(frozen=True)
class Radius(Row):
    """One radius: the slope of the error in n, and the constant C of error = C/√n."""

    radius: Amount
    slope: Number
    slope_se: Amount
    constant: Amount
    errors: Annotated[list[Amount], at_least(1)]


@dataclass(frozen=True)
class Growth(Row):
    """How the constant grows with the radius.

    Args:
        shape: the shape that leaves the least variance unexplained: `R^a`, `exp(aR)` or `exp(aR²)`.
        rate: its a.
        unexplained: share of the variance that each shape leaves unexplained.
        radii: number of radii it is fitted to.
    """

    shape: str
    rate: Number
    unexplained: dict[str, Number]
    radii: Whole

    @property
    def likely(self) -> list[str]:
        """The best shape, and all shapes that leave less than twice as much variance unexplained."""
        ordered = sorted(self.unexplained, key=lambda shape: self.unexplained[shape])
        return [shape for shape in ordered if self.unexplained[shape] < 2 * self.unexplained[ordered[0]] + 1e-12]


@dataclass(frozen=True, kw_only=True)
class Uniform(replicates.Replicated):
    """Rates by radius, and how the constant grows; that is None where too few radii have the rate 1/√n."""

    law: Literal["gaussian", "sphere", "mixture"]
    dimension: Whole
    lengths: Annotated[list[Tokens], at_least(1)]
    rows: Annotated[list[Radius], at_least(1)]
    growth: Growth | None

    fits = staticmethod(replicates.rows_fit("errors"))


def run(settings: Settings, progress: Progress[Uniform]) -> Uniform:
    from bayesattn.studies.convergence.laws import LAWS
    from bayesattn.studies.convergence.uniform import measure

    law, seed = LAWS[settings.law](settings.dimension), settings.seed
    grid = settings.grid("500-4000" if settings.quick else "2000-32000", 5)
    radii, total = parse_numbers(settings.radii, "--radii"), settings.draws(8, 24)

    def result(squared: Tensor) -> Uniform:
        rows = measure.rows(radii, grid, squared)
        return Uniform(
            law=settings.law,
            dimension=settings.dimension,
            lengths=grid,
            replicates=len(squared),
            seed=seed,
            rows=rows,
            growth=measure.growth(rows),
        )

    drawn = {"law": settings.law, "dimension": settings.dimension, "lengths": grid, "radii": radii, "seed": seed}
    return replicates.collect(
        progress, drawn, lambda first: measure.sweep(law, radii, grid, total, seed, first), total, result
    )


STUDY = Study(kind="convergence-uniform", commands={"convergence uniform": Settings}, run=run, result=Uniform, place=72)
