"""Times and memory as tables and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from bayesattn.drawing.figures import lines_by_length, make_figure, save_figure
from bayesattn.drawing.tables import duration, make_table, megabytes
from bayesattn.studies.bench.attention.run import BASELINE, Timing, Timings
from bayesattn.studies.bench.drawing import largest_error
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase


def tables(result: Timings) -> list[Table | str]:
    return [_table([row for row in result.rows if row.phase == phase], phase) for phase in (FORWARD, TRAINING)]


def _table(rows: list[Timing], phase: Phase) -> Table:
    """Lengths down, methods across: the ratio to the baseline's time, the time, and peak memory where measured."""
    table = make_table(
        title=f"{phase}: time as a multiple of {BASELINE[phase]}",
        caption=largest_error(rows),
        min_width=66,  # of the title and the caption
        columns=("tokens",),
    )
    for method in dict.fromkeys(row.method for row in rows):
        table.add_column(method.replace(", ", "\n").replace(" with ", "\nwith "), justify="right")
    for length in sorted({row.tokens for row in rows}):
        table.add_row(f"{length:,}", *(_field(row) for row in rows if row.tokens == length))
    return table


def _field(row: Timing) -> str:
    if row.seconds is None:
        return row.note
    time = duration(row.seconds) if row.ratio is None else f"{row.ratio:.2f}× {duration(row.seconds)}"
    return time if row.peak_bytes is None else f"{time}\n{megabytes(row.peak_bytes)}"


def figures(result: Timings, folder: Path) -> list[Path]:
    """Seconds against tokens for both phases, and peak memory of training; all axes logarithmic."""
    figure = make_figure(width=15, height=4.8)
    methods = list(dict.fromkeys(row.method for row in result.rows))
    panels = [("forward", FORWARD), (TRAINING, TRAINING), (f"memory, {TRAINING}", TRAINING)]
    for index, (title, phase) in enumerate(panels):
        memory = index == 2
        lines = {
            method: [
                (row.tokens, (row.peak_bytes or 0) / 1e6 if memory else row.seconds)
                for row in result.rows
                if (row.phase, row.method) == (phase, method)
            ]
            for method in methods
        }
        label = "MB above the inputs" if memory else "seconds"
        lines_by_length(figure.add_subplot(1, 3, index + 1), title, label, lines, range(len(methods)))
    return save_figure(figure, folder / "attention")
