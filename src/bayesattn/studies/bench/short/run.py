"""Attention of short contexts, as training has them, against plain SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from bayesattn.errors import UserError, shown
from bayesattn.schemas import Amount, Row
from bayesattn.studies.bench import runs
from bayesattn.studies.bench.runs import Phase
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from bayesattn.studies.bench.inputs import Shape


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time attention of short contexts, forward and backward.

    The peer is plain SDPA without a prior. Results that differ from the float64 reference are not timed. It takes about
    three minutes on two cores and saves the JSON file after every shape.

    Example: bayesattn bench short --shapes 16x4x128x32,16x8:2x128x64/4 --json short.json
    """

    file: ClassVar[str] = "short"
    title: ClassVar[str] = "bench-short"

    shapes: Annotated[
        str,
        typer.Option(
            metavar="SHAPE,…",
            help="Batch x heads x tokens x head size; 8:2 for 8 heads on two key heads, /4 for four packed documents.",
        ),
    ] = (
        "16x4x128x32,16x4x128x32/4,16x8x128x64,16x8:2x128x64,16x8x128x64/4,2x8x512x64,2x8:2x512x64,2x8x512x64/4,"
        "2x8x1024x64,1x8x2048x64,1x8x4096x64"
    )


@dataclass(frozen=True)
class Timing(Row):
    """One phase of one shape.

    Args:
        shape: as `Shape.parse` reads it.
        seconds: time of our attention with prior and Scalable Softmax, in training with the gradients of all five
            inputs; None if it is wrong.
        plain_seconds: time of plain causal SDPA, without prior, scale and documents.
        ratio: the first over the second.
        gemm_share: share of the machine's rate of matrix products that the visible half of the logits takes.
        error: largest relative error against the float64 reference.
    """

    shape: str
    phase: Phase
    seconds: Amount | None
    plain_seconds: Amount
    ratio: Amount | None
    gemm_share: Amount | None
    error: Amount | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Timings(runs.Measured):
    """Both phases of every shape."""

    rows: list[Timing]


def parse_shapes(text: str) -> list[Shape]:
    """Shapes with commas between them."""
    from bayesattn.studies.bench.inputs import Shape

    shapes = []
    for part in text.split(","):
        try:
            shapes.append(Shape.parse(part))
        except ValueError:
            raise UserError(
                f"--shapes has {shown(part)}; give shapes such as 16x4x128x32 that fit in this machine's memory, with "
                "commas between them"
            ) from None
    return list(dict.fromkeys(shapes))


def run(settings: Settings, progress: Progress[Timings]) -> Timings:
    from bayesattn.studies.bench.short import measure

    shapes = {str(shape): shape for shape in parse_shapes(settings.shapes)}
    sizes = measure.sizes(list(shapes.values()), settings.seed)
    result = runs.stopped(progress, sizes) or Timings(settings=sizes, rows=[])
    for rows in runs.by_part(
        progress,
        "measuring",
        list(shapes),
        result.rows,
        lambda row: row.shape,
        lambda missing: measure.measure([shapes[name] for name in missing], settings.seed),
    ):
        result = Timings(settings=sizes, rows=rows)
        progress.keep(result)
    return result


STUDY = Study(kind="bench-short", commands={"bench short": Settings}, run=run, result=Timings, place=102)
