"""How fast the mean and the covariance of attention outputs converge, depending on the horizon of the attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from bayesattn.schemas import Amount, Anything, Number, Row, Tokens, Whole, at_least
from bayesattn.studies.convergence import replicates
from bayesattn.studies.options import finite, parse_range
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from torch import Tensor

Law = Literal["gaussian", "sphere", "mixture"]

# The closed form is checked with a million tokens at horizons below this; above it, few tokens carry all the weight.
LARGEST_CHECKED_HORIZON = 0.5


@dataclass(frozen=True, kw_only=True)
class Settings(replicates.Settings):
    law: ClassVar[Law]

    scales: Annotated[str, typer.Option(metavar="S-S", help="Smallest and largest scale of the logits.")] = "0.05-50"
    number: Annotated[int, typer.Option(min=1, max=100, help="Number of scales, in a geometric series.")] = 12
    dimension: Annotated[int, typer.Option(help="Dimension of the tokens.")] = 50
    variance: Annotated[
        float, typer.Option(min=1e-6, max=1e6, callback=finite, help="Variance of the tokens in each direction.")
    ] = 0.1
    share: Annotated[
        int,
        typer.Option(
            min=1, max=2**20, metavar="N", help="Use every N-th token as a query; the errors are corrected for this."
        ),
    ] = 8
    dense: Annotated[bool, typer.Option("--dense", help="Compare one replicate with a loop over dense attention.")] = (
        False
    )


def _settings(law: str) -> type[Settings]:
    """Settings of the command of a law."""
    of_law = type(
        f"{law.capitalize()}Settings",
        (Settings,),
        {
            "law": law,
            "file": f"convergence-{law}",
            "pictures": (f"convergence-{law}",),
            "__module__": __name__,
            "__doc__": f"""Show how fast attention to {law} tokens converges.

    Measures errors of the mean of its outputs (2-norm) and of their covariance (Frobenius norm) against the limit, and
    fits powers of n.

    Example: bayesattn convergence {law} --quick --json {law}.json
    """,
        },
    )
    return dataclass(frozen=True, kw_only=True)(of_law)


@dataclass(frozen=True)
class Rate(Row):
    """One scale of the logits: the horizon, the rates of both moments, and the errors they are fitted to."""

    scale: Amount
    horizon: Amount
    slope_mean: Number
    slope_mean_se: Amount
    slope_cov: Number
    slope_cov_se: Amount
    errors_mean: Annotated[list[Amount], at_least(1)]
    errors_cov: Annotated[list[Amount], at_least(1)]


@dataclass(frozen=True, kw_only=True)
class Moments(replicates.Replicated):
    """Rates by scale. `deviation` is that of a million tokens from the closed form, at `checked_scale`."""

    law: Law
    dimension: Whole
    variance: Amount
    lengths: Annotated[list[Tokens], at_least(1)]
    share: Tokens
    rows: Annotated[list[Rate], at_least(1)]
    deviation: Amount | None = None
    checked_scale: Amount | None = None
    speed: Anything | None = None

    fits = staticmethod(replicates.rows_fit("errors_mean", "errors_cov"))


def run(settings: Settings, progress: Progress[Moments]) -> Moments:
    from bayesattn.studies.convergence.laws import LAWS
    from bayesattn.studies.convergence.moments import measure

    law, seed, share = LAWS[settings.law](settings.dimension, settings.variance), settings.seed, settings.share
    quick = settings.quick
    grid = settings.grid("500-8000" if quick else "1000-30000", 8 if quick else 12)
    scales = measure.scales(*parse_range(settings.scales, "--scales"), settings.number)
    total = settings.draws(40, 200)

    def result(errors: Tensor) -> Moments:
        return Moments(
            law=settings.law,
            dimension=settings.dimension,
            variance=settings.variance,
            lengths=grid,
            share=share,
            replicates=len(errors),
            seed=seed,
            rows=measure.rows(law, scales, grid, errors, seed),
        )

    drawn = {"law": settings.law, "dimension": settings.dimension, "variance": settings.variance, "share": share}
    moments = replicates.collect(
        progress,
        {**drawn, "lengths": grid, "scales": scales, "seed": seed},
        lambda first: measure.sweep(law, scales, grid, total, share=share, seed=seed, first=first),
        total,
        result,
    )
    checked = [row.scale for row in moments.rows if row.horizon < LARGEST_CHECKED_HORIZON]
    if checked:
        progress.step("checking the closed form")
        moments = replace(
            moments, checked_scale=checked[-1], deviation=measure.check_limit(law, checked[-1], seed=seed)
        )
    if settings.dense:
        progress.step("comparing with dense attention")
        moments = replace(moments, speed=measure.compare_dense(law, scales, grid, share, seed).to_dict())
    return moments


STUDY = Study(
    kind="convergence",
    commands={f"convergence {law}": _settings(law) for law in ("gaussian", "sphere", "mixture")},
    run=run,
    result=Moments,
    place=71,
)
