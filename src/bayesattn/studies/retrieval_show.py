"""Tables and curves of retrieval trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing import html, svg
from bayesattn.drawing.figures import legend_beside, make_figure, save_figure, ticks_at
from bayesattn.drawing.html import Cell as Field
from bayesattn.drawing.palette import line_style
from bayesattn.drawing.tables import duration, make_table, multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name
from bayesattn.studies.retrieval import Retrieval


def cells_table(cells: Sequence[Cell], train_length: int, title: str) -> Table:
    """Lengths down: right answers, trials, the share with its interval, and the time."""
    table = make_table(
        title,
        "low and high: 95% Wilson interval of the share right",
        columns=("tokens", "length", "right", "trials", "share", "low", "high", "time"),
    )
    table.add_column("")
    for cell in cells:
        shares = (
            ["–"] * 3 if cell.accuracy is None else [f"{share:.1%}" for share in (cell.accuracy, cell.low, cell.high)]
        )
        short = f"{cell.planned:,} planned" if cell.trials < cell.planned and not cell.note else cell.note
        time = duration(cell.seconds) if cell.trials else "–"
        length = multiple(cell.length, train_length)
        table.add_row(f"{cell.length:,}", length, f"{cell.right:,g}", f"{cell.trials:,}", *shares, time, short)
    return table


def names_of(results: Sequence[Retrieval], *, seeds: bool = False) -> list[str]:
    """Unique names: the model, with its seed if `seeds` or if models repeat, and a number if that still repeats."""
    names = [short_name(result.model) for result in results]
    if seeds or len(set(names)) < len(names):
        names = [f"{name}, seed {result.settings['seed']}" for name, result in zip(names, results, strict=True)]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def curves(title: str, results: Sequence[Retrieval], y: str, caption: str, right: str) -> Markup:
    """A chart of the share right by length, a line for each result, and all cells as a table."""
    series, rows = [], []
    for result, name in zip(results, names_of(results), strict=True):
        series.append((name, [_point(name, cell) for cell in result.cells if cell.trials]))
        rows += [_row(name, cell, result.train_length) for cell in result.cells]
    lengths = [point.x for _, points in series for point in points] or [1, 10]
    chart = svg.lines(f"{title}, by length", series, svg.log_axis(lengths, "tokens of the prompt"), svg.shares(y))
    heads = ["model", "tokens", "times the training length", right, "trials", "share", "low", "high", "seconds a trial"]
    return html.joined(
        [
            html.heading(title),
            html.figure(chart, svg.key([name for name, _ in series])),
            html.table(caption, [*heads, "note"], rows),
        ]
    )


def _point(name: str, cell: Cell) -> svg.Point:
    label = f"{name}, {cell.length:,} tokens: {cell.right:g} of {cell.trials}"
    return svg.Point(cell.length, cell.accuracy or 0.0, cell.low, cell.high, label)


def _row(name: str, cell: Cell, train_length: int) -> list[Field]:
    shares, each = [Field("–", -1)] * 3, Field("–", 0)
    if cell.accuracy is not None:
        shares = [html.share(share) for share in (cell.accuracy, cell.low, cell.high)]
        each = Field(f"{cell.seconds / cell.trials:.2f}", cell.seconds / cell.trials)
    return [
        html.words(name),
        html.count(cell.length),
        Field(multiple(cell.length, train_length), cell.length / train_length),
        Field(f"{cell.right:,g}", cell.right),
        html.count(cell.trials),
        *shares,
        each,
        html.words(cell.note),
    ]


def accuracy_figure(results: Mapping[str, Sequence[Cell]], train_length: int, path: Path, label: str) -> list[Path]:
    """Accuracy against length, one line per name, with 95% intervals; lengths without trials are left out."""
    figure = make_figure(width=9, height=4.8)
    axes = figure.add_subplot(1, 1, 1)
    for position, (name, cells) in enumerate(results.items()):
        tried = [(cell, cell.accuracy) for cell in cells if cell.accuracy is not None]
        axes.errorbar(
            # apart, so that none hides another
            [cell.length * 1.02 ** (position - len(results) / 2) for cell, _ in tried],
            [share for _, share in tried],
            yerr=[
                [max(0.0, share - cell.low) for cell, share in tried],
                [max(0.0, cell.high - share) for cell, share in tried],
            ],
            **line_style(position, mark=True),
            markersize=5,
            capsize=2,
            label=name,
        )
    axes.axvline(train_length, color="#999999", linewidth=1)
    axes.annotate("trained here", (train_length, 1.06), fontsize=8, color="#666666", ha="left")
    axes.set(xscale="log", ylim=(-0.04, 1.12), xlabel="tokens of the prompt", ylabel=label)
    ticks_at(axes, sorted({cell.length for cells in results.values() for cell in cells}))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.grid(alpha=0.25)
    legend_beside(axes)
    return save_figure(figure, path)
