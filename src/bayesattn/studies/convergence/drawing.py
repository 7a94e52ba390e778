"""Axes that figures of convergence share, and charts for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bayesattn.drawing import html, svg
from bayesattn.drawing.palette import line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HALF = "1/√n"


def against_tokens(axes: Axes, title: str, grid: Sequence[int], lines: Mapping[str, Sequence[float]]) -> None:
    """Errors by name against n, both axes logarithmic."""
    for index, (label, errors) in enumerate(lines.items()):
        axes.plot(grid, errors, markersize=4, label=label, **line_style(index, mark=True))
    axes.set(title=title, xscale="log", yscale="log", xlabel="tokens n")
    shown = [grid[0], grid[len(grid) // 2], grid[-1]]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def slopes(
    axes: Axes,
    horizons: Sequence[float],
    measured: Sequence[tuple[float, float]],
    label: str,
    index: int,
    *,
    line: bool = True,
) -> None:
    """Slopes with 95% intervals, from (slope, standard error), against the horizon."""
    style: dict[str, Any] = line_style(index, mark=True)
    axes.errorbar(
        horizons,
        [slope for slope, _ in measured],
        yerr=[1.96 * error for _, error in measured],
        markersize=5,
        capsize=2,
        label=label,
        **(style if line else {**style, "linestyle": "none"}),
    )


def finish_slopes(axes: Axes, title: str = "slope against horizon") -> None:
    axes.axhline(-0.5, color="#999999", linewidth=1)
    axes.annotate(
        HALF, (0.99, -0.5), xycoords=("axes fraction", "data"), fontsize=8, color="#666666", va="bottom", ha="right"
    )
    axes.set(title=title, xlabel="horizon H", ylabel="slope, 95% intervals", xscale="log")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def error_chart(title: str, lines: Mapping[str, Iterable[tuple[float, float]]]) -> Markup:
    """A chart of errors by length, with its key, for the page."""
    series = [
        (name, [svg.Point(x, y, y, y, f"{name}, {x:,.0f} tokens: {y:.3g}") for x, y in points if y > 0])
        for name, points in lines.items()
    ]
    drawn = [point for _, points in series for point in points]
    x = svg.log_axis([point.x for point in drawn] or [1, 10], "tokens", powers=True)
    y = svg.log_axis([point.y for point in drawn] or [1, 10], "error", powers=True)
    return html.figure(svg.lines(title, series, x, y), svg.key(list(lines)))
