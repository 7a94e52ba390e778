"""Perplexity as a table, a picture, and a section of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.data.text import BUNDLED
from bayesattn.drawing import html, svg
from bayesattn.drawing.figures import legend_beside, make_figure, save_figure, ticks_at
from bayesattn.drawing.palette import colour, line_style
from bayesattn.drawing.tables import make_table
from bayesattn.files import short_name
from bayesattn.studies.perplexity.run import Loss, ModelLosses, Perplexity


def tables(result: Perplexity) -> list[Table | str]:
    return [_table(result), *_notes(result)]


def _axis(result: Perplexity) -> str:
    return "tokens before" if result.by == "context" else "position"


def _compared(result: Perplexity) -> str:
    return "on the same windows" if result.by == "context" else "of other tokens"


def _table(result: Perplexity) -> Table:
    """Models and contexts down: perplexity, and its change against the model's first row."""
    source = "the held-out part of the bundled text" if result.text == BUNDLED else result.text
    caption = f"change: against the model's first row, {_compared(result)}; 95% intervals"
    table = make_table(f"Perplexity of {source}, by {result.by}", caption)
    table.add_column("model", overflow="fold")
    for name in (_axis(result), "perplexity", "interval", "change", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, model in enumerate(result.models):
        if number:
            table.add_section()
        for row in model.rows:
            change, low, high = (math.expm1(x) for x in (row.change, row.change_low, row.change_high))
            first = row is model.rows[0]
            table.add_row(
                short_name(model.model) if first else "",
                f"{row.context:,}",
                f"{row.perplexity:,.2f}",
                f"{row.low:,.2f} … {row.high:,.2f}",
                "" if first else f"{change:+.1%}",
                "" if first else f"{low:+.1%} … {high:+.1%}",
            )
    return table


def _notes(result: Perplexity) -> list[str]:
    notes = []
    for model in result.models:
        name = short_name(model.model)
        if result.by == "position":
            notes.append(f"{name}: {model.length:,} tokens of {model.texts} were read.")
        elif missing := _missing(model):
            notes.append(f"{name}: not measured on all windows, with {missing} tokens before them.")
        notes.append(
            f"{name}: more than {model.effective_context:,} tokens before do not lower the loss by more than chance."
        )
    return notes


def _missing(model: ModelLosses) -> str:
    """Contexts that there was no time for, or not for all windows."""
    measured = {row.context: row.windows for row in model.rows}
    windows = len(model.starts or ())
    return ", ".join(f"{context:,}" for context in model.contexts or () if measured.get(context, 0) < windows)


def figures(result: Perplexity, folder: Path) -> list[Path]:
    """Perplexity against context or position, one line per model, with 95% intervals."""
    figure = make_figure(width=9, height=4.8)
    axes = figure.add_subplot(1, 1, 1)
    contexts = sorted({row.context for model in result.models for row in model.rows})
    least = min((context for context in contexts if context), default=1)
    for position, model in enumerate(result.models):
        at, rows = [row.context for row in model.rows], model.rows
        axes.fill_between(at, [row.low for row in rows], [row.high for row in rows], color=colour(position), alpha=0.15)
        axes.plot(
            at, [row.perplexity for row in rows], markersize=5, label=model.model, **line_style(position, mark=True)
        )
    axes.set(xlabel=_axis(result), ylabel="perplexity", yscale="log")
    axes.set_xscale("symlog", linthresh=max(1, least))
    ticks_at(axes, contexts)
    axes.set_xlim(left=min(contexts) * 0.9 - 0.1 * least * (min(contexts) == 0))
    axes.yaxis.set_major_formatter("{x:g}")
    shown = [row.perplexity for model in result.models for row in model.rows]
    axes.yaxis.set_minor_formatter("{x:g}" if max(shown) < 10 * min(shown) else "")
    axes.grid(alpha=0.25, which="both", axis="y")
    legend_beside(axes)
    return save_figure(figure, folder / "perplexity")


def sections(results: Sequence[Perplexity]) -> list[html.Section]:
    return [html.Section("perplexity", "Perplexity", html.joined(map(_chart_and_table, results)))]


def _chart_and_table(result: Perplexity) -> Markup:
    series, rows = [], []
    for model in result.models:
        name = short_name(model.model)
        series.append((name, [_point(name, row, result.by) for row in model.rows]))
        rows += [_fields(name, row, first=row is model.rows[0]) for row in model.rows]
    heads = ["model", _axis(result), "perplexity", "low", "high", "change"]
    heads += ["windows" if result.by == "context" else "samples", "seconds"]
    return html.joined(
        [
            html.heading(f"by {result.by}, {result.text} text"),
            html.figure(_chart(series, _axis(result)), svg.key([name for name, _ in series])),
            html.table(f"Change: against the first row of the model, {_compared(result)}", heads, rows),
            *map(html.paragraph, _notes(result)),
        ]
    )


def _point(name: str, row: Loss, by: str) -> svg.Point:
    where = f"from position {row.context:,} on" if by == "position" else f"{row.context:,} tokens before"
    return svg.Point(row.context + 1, row.perplexity, row.low, row.high, f"{name}, {where}: {row.perplexity:,.2f}")


def _fields(name: str, row: Loss, *, first: bool) -> list[html.Cell]:
    return [
        html.words(name),
        html.count(row.context),
        *(html.Cell(f"{value:,.2f}", value) for value in (row.perplexity, row.low, row.high)),
        html.Cell("" if first else f"{math.expm1(row.change):+.1%}", row.change),
        html.count(row.windows),
        html.Cell(f"{row.seconds:.1f}", row.seconds),
    ]


def _chart(series: Sequence[tuple[str, Sequence[svg.Point]]], label: str) -> Markup:
    across = sorted({point.x for _, points in series for point in points}) or [1, 10]
    ticks = [(x, f"{x - 1:,.0f}") for x in across[:: max(1, len(across) // 8)]]
    x = svg.Axis(min(across), max(across), ticks, label, logarithmic=True)
    bounds = [bound for _, points in series for point in points for bound in (point.low, point.high)] or [1.0, 10.0]
    least, most = min(bounds), max(bounds)
    steps = [least * (most / least) ** (i / 4) for i in range(5)]
    y = svg.Axis(least, most, [(step, f"{step:,.1f}") for step in steps], "perplexity", logarithmic=True)
    return svg.lines("Perplexity", series, x, y)
