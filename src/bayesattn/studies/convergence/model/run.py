"""Convergence in a real transformer: samples are drawn from the queries, keys and values of its layers on a text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from bayesattn.schemas import Amount, Number, Row, Share, Tokens, Whole, Wrong, at_least
from bayesattn.studies.convergence import replicates
from bayesattn.studies.options import Text
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from torch import Tensor

Sampling = Literal["iid", "window"]


@dataclass(frozen=True)
class Settings(replicates.Settings):
    """Show how fast attention converges in a real transformer.

    Rates are by layer and head. Draws the queries, keys and values of each layer on a text. The sampled tokens attend
    to each other by content alone, without mask and prior. The limit is attention over all tokens of the text.

    Example: bayesattn convergence model bam-tiny --tokens 2048 --lengths 64-1024
    """

    file: ClassVar[str] = "convergence-model"
    title: ClassVar[str] = "convergence"
    pictures: ClassVar[tuple[str, ...]] = ("convergence-model",)
    named: ClassVar[tuple[str, ...]] = ("model", "sampling")

    model: Annotated[
        str, typer.Argument(metavar="[NAME]", help="minilm, a shipped name, a folder, or a Hugging Face id.")
    ] = "minilm"
    tokens: Annotated[
        int, typer.Option(min=32, max=2**20, help="Number of tokens of the text to draw samples from.")
    ] = 512
    text: Text = "bundled"
    sampling: Annotated[
        Sampling,
        typer.Option(help="iid: tokens from anywhere; window: every second token from a window of neighbours."),
    ] = "iid"


@dataclass(frozen=True)
class HeadRate(Row):
    """The rates of one head, or of a whole layer: then `head` is None and the horizon is the largest of its heads."""

    layer: Whole
    head: Whole | None
    horizon: Amount
    slope_mean: Number
    slope_mean_se: Amount
    slope_cov: Number
    slope_cov_se: Amount


@dataclass(frozen=True, kw_only=True)
class ModelRates(replicates.Replicated):
    """Rates by head and layer; `rank_correlation` of slope with horizon over heads, with its p-value, by moment."""

    model: str
    tokens: Tokens
    sampling: Sampling
    lengths: Annotated[list[Tokens], at_least(1)]
    rank_correlation: dict[str, tuple[Number, Share]]
    rows: Annotated[list[HeadRate], at_least(1)]

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
        """Every layer has heads, and a row of its own."""
        heads, layers = (
            {row["layer"] for row in content["rows"] if (row["head"] is None) == whole} for whole in (0, 1)
        )
        return None if heads == layers else (".rows", "has layers without heads, or heads without their layer")


def run(settings: Settings, progress: Progress[ModelRates]) -> ModelRates:
    from bayesattn.studies.convergence import layers
    from bayesattn.studies.convergence.fits import rank_correlation
    from bayesattn.studies.convergence.model import measure

    tokens, sampling, seed = settings.tokens, settings.sampling, settings.seed
    grid, total = settings.grid(f"{tokens // 8}-{tokens * 3 // 4}", 6), settings.draws(50, 500)
    progress.step(f"loading {settings.model}")
    model, tokenizer = layers.load(settings.model)
    progress.step(f"reading {tokens:,} tokens")
    read = layers.read_layers(model, layers.read_text(model, tokenizer, settings.text, tokens), settings.model)
    progress.step("computing the limits")

    def result(errors: Tensor) -> ModelRates:
        rows = measure.rows(read, grid, errors)
        heads = [row for row in rows if row.head is not None]
        horizons = [row.horizon for row in heads]
        return ModelRates(
            model=settings.model,
            tokens=tokens,
            sampling=sampling,
            lengths=grid,
            replicates=len(errors),
            seed=seed,
            rows=rows,
            rank_correlation={
                "mean": rank_correlation(horizons, [row.slope_mean for row in heads]),
                "covariance": rank_correlation(horizons, [row.slope_cov for row in heads]),
            },
        )

    content = hashlib.sha256(read[-1].q.contiguous().numpy().tobytes()).hexdigest()[:16]  # of the model and the text
    return replicates.collect(
        progress,
        {"layers": content, "sampling": sampling, "lengths": grid, "seed": seed},
        lambda first: measure.sweep(read, grid, total, sampling, seed, first),
        total,
        result,
    )


STUDY = Study(kind="convergence-model", commands={"convergence model": Settings}, run=run, result=ModelRates, place=74)
