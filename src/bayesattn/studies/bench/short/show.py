"""Both phases of short contexts as tables."""

from __future__ import annotations

from rich.table import Table

from bayesattn.drawing.tables import duration, make_table
from bayesattn.studies.bench.drawing import largest_error
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase
from bayesattn.studies.bench.short.run import Timing, Timings

SHAPE = (
    "shape: batch x heads x tokens x head size; 8:2, two key heads; /4, four packed documents, which plain SDPA does "
    "not tell apart; GEMM: share of the rate of a large matrix product, visible pairs alone counted"
)


def tables(result: Timings) -> list[Table | str]:
    return [_table([row for row in result.rows if row.phase == phase], phase) for phase in (FORWARD, TRAINING)]


def _table(rows: list[Timing], phase: Phase) -> Table:
    """Shapes down: the time, as a multiple of plain SDPA's, and the share of the machine's GEMM rate."""
    table = make_table(
        title=f"{phase}, prior and Scalable Softmax: time as a multiple of plain causal SDPA",
        caption="\n".join(filter(None, (SHAPE, largest_error(rows)))),
        min_width=76,  # of the title
    )
    table.add_column("shape", no_wrap=True)
    for heading in ("plain SDPA", "bayesattn", "GEMM"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.shape, duration(row.plain_seconds), _field(row), _share(row))
    return table


def _field(row: Timing) -> str:
    if row.seconds is None or row.ratio is None:
        return row.note
    return f"{row.ratio:.2f}× {duration(row.seconds)}"


def _share(row: Timing) -> str:
    return "–" if row.gemm_share is None else f"{row.gemm_share:.0%}"
