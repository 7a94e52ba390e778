"""Convergence as the temperature goes to zero: does the error fall as a power of n, or of its logarithm?"""

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

# The better law must lower the misfit by this much. For Gaussian errors, 6 means odds of e³ to 1.
LEAST_DIFFERENCE = 6.0


@dataclass(frozen=True, kw_only=True)
class Settings(replicates.Settings):
    """Find the rate as the temperature goes to zero.

    Does the error fall as a power of n, or of log n?

    Example: bayesattn convergence hardmax --law sphere
    """

    file: ClassVar[str] = "convergence-hardmax"
    pictures: ClassVar[tuple[str, ...]] = ("convergence-hardmax",)

    law: Annotated[Literal["gaussian", "sphere"], typer.Option(help="The law of the tokens.")] = "gaussian"
    sharpness: Annotated[
        str, typer.Option(metavar="S,S,…", help="Standard deviations of the logits; inf is hardmax.")
    ] = "1,2,4,8,inf"
    dimension: replicates.Dimension = 8


@dataclass(frozen=True)
class Temperature(Row):
    """One sharpness of attention: the best fits n^a and (log n)^b to the error, and which of the two fits better.

    `sharpness` is the standard deviation of the logits; None stands for infinite, which is hardmax. `power` is a,
    `logarithmic` is b.
    """

    derived: ClassVar[tuple[str, ...]] = ("preferred",)

    sharpness: Amount | None
    power: Number
    power_se: Amount
    power_misfit: Amount
    logarithmic: Number
    logarithmic_se: Amount
    logarithmic_misfit: Amount
    errors: Annotated[list[Amount], at_least(1)]

    @property
    def preferred(self) -> str:
        # If neither law fits, the residuals exceed the noise, so the difference has to be larger too.
        excess = max(1.0, min(self.logarithmic_misfit, self.power_misfit) / max(1, len(self.errors) - 2))
        difference = (self.logarithmic_misfit - self.power_misfit) / excess
        return "cannot tell" if abs(difference) < LEAST_DIFFERENCE else "power" if difference > 0 else "logarithmic"

    @property
    def name(self) -> str:
        return "hardmax" if self.sharpness is None else f"sharpness {self.sharpness:g}"


@dataclass(frozen=True, kw_only=True)
class Hardmax(replicates.Replicated):
    """Both fits by sharpness."""

    law: Literal["gaussian", "sphere"]
    dimension: Whole
    lengths: Annotated[list[Tokens], at_least(1)]
    rows: Annotated[list[Temperature], at_least(1)]

    fits = staticmethod(replicates.rows_fit("errors"))


def run(settings: Settings, progress: Progress[Hardmax]) -> Hardmax:
    from bayesattn.studies.convergence.hardmax import measure
    from bayesattn.studies.convergence.laws import LAWS

    law, seed = LAWS[settings.law](settings.dimension), settings.seed
    grid = settings.grid("100-30000" if settings.quick else "100-300000", 10)
    values, total = parse_numbers(settings.sharpness, "--sharpness", infinite=True), settings.draws(60, 200)

    def result(squared: Tensor) -> Hardmax:
        return Hardmax(
            law=settings.law,
            dimension=settings.dimension,
            lengths=grid,
            replicates=len(squared),
            seed=seed,
            rows=measure.rows(values, grid, squared),
        )

    drawn = {"law": settings.law, "dimension": settings.dimension, "lengths": grid, "sharpness": values, "seed": seed}
    return replicates.collect(
        progress, drawn, lambda first: measure.sweep(law, values, grid, total, seed, first), total, result
    )


STUDY = Study(kind="convergence-hardmax", commands={"convergence hardmax": Settings}, run=run, result=Hardmax, place=73)
