"""The history of heads as a table, a picture, and charts of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing import html, svg
from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.palette import LIGHT, colour
from bayesattn.drawing.tables import make_table
from bayesattn.studies.history.run import AGGRESSIVE_BETA, HeadHistory, History

# Lines that separate the clusters.
BORDERS = (0.0, AGGRESSIVE_BETA)
TICKS = 5


def tables(result: History) -> list[Table | str]:
    names = list(dict.fromkeys(name for head in result.heads for name in head.parameters))
    with_beta = "beta" in names
    table = make_table(
        title=f"{result.run}: what each head learned in {result.steps[-1]:,} steps",
        caption="parameters: at the first and at the last step of the log"
        + ("; kind: by beta at the end, and the step since which the head is of it" if with_beta else ""),
        columns=("layer", "head"),
    )
    if with_beta:
        table.add_column("kind", min_width=10)
        table.add_column("since", justify="right")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for head in result.heads:
        if head.head == 0 and head.layer:
            table.add_section()
        kind = [head.clusters[-1], f"{head.since(result.steps):,}"] if "beta" in head.parameters else ["–", "–"]
        table.add_row(
            str(head.layer + 1) if head.head == 0 else "",
            str(head.head),
            *(kind if with_beta else []),
            *(_change(head.parameters.get(name, [])) for name in names),
        )
    return [table]


def _change(values: Sequence[float | None]) -> str:
    if not values:
        return "–"
    first, last = ("–" if value is None else f"{value:.2f}" for value in (values[0], values[-1]))
    return f"{first} → {last}"


def _layers(result: History) -> list[tuple[str, str, list[HeadHistory]]]:
    """Title, the parameter to draw, and heads of each layer that has any: β, or else the first parameter."""
    layers = []
    for number in sorted({head.layer for head in result.heads}):
        heads = [head for head in result.heads if head.layer == number]
        names = list(heads[0].parameters)
        drawn = "beta" if "beta" in names else names[0]
        layers.append((f"layer {number + 1}", drawn, [head for head in heads if drawn in head.parameters]))
    return layers


def figures(result: History, folder: Path) -> list[Path]:
    """A panel for each layer: β of its heads against training steps, and the borders of the clusters."""
    layers = _layers(result)
    columns = min(3, len(layers))
    figure = make_figure(width=4.2 * columns, height=3.4 * -(-len(layers) // columns))
    first = None
    for index, (title, name, heads) in enumerate(layers):
        axes = figure.add_subplot(-(-len(layers) // columns), columns, index + 1, sharey=first)
        first = first or axes
        for head in heads:
            values = [float("nan") if value is None else value for value in head.parameters[name]]
            axes.plot(result.steps, values, color=colour(head.head), linewidth=1.3, label=f"head {head.head}")
        for border in BORDERS if name == "beta" else ():
            axes.axhline(border, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(title=title, xlabel="training steps", ylabel="β" if name == "beta" else name)
        axes.grid(alpha=0.25)
        if len(heads) <= len(LIGHT):
            axes.legend(fontsize=6.5, frameon=False)
    return save_figure(figure, folder / "history")


def chart(result: History) -> Markup:
    """Charts of the page, one a layer."""
    last = max(1, result.steps[-1])
    x = svg.Axis(0, last, [(at, f"{at:,.0f}") for at in (last * i / (TICKS - 1) for i in range(TICKS))], "step")
    charts = []
    for title, name, heads in _layers(result):
        known = [value for head in heads for value in head.parameters[name] if value is not None]
        least, most = min([*known, -1.0]), max([*known, 1.0])
        y = svg.Axis(least, most, [(value, f"{value:g}") for value in (-1, -0.6, 0, 1)], name)
        series = [
            (
                f"head {head.head}",
                [
                    svg.Point(step, value, value, value, "")
                    for step, value in zip(result.steps, head.parameters[name], strict=True)
                    if value is not None
                ],
            )
            for head in heads
        ]
        drawing = svg.lines(f"{result.run}, {title}: {name}", series, x, y, marked=False)
        charts += [
            html.heading(f"{result.run}, {title}"),
            html.figure(drawing, svg.key([line for line, _ in series], marked=False)),
        ]
    return html.joined(charts)
