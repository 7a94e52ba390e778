"""Measured and predicted errors as a table, a picture, and a section of the page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing.figures import legend_beside, make_figure, save_figure
from bayesattn.drawing.palette import line_style
from bayesattn.drawing.tables import make_table
from bayesattn.studies.convergence.drawing import error_chart
from bayesattn.studies.convergence.prior.run import Floors
from bayesattn.studies.convergence.replicates import title_end


def tables(result: Floors) -> list[Table | str]:
    longest = f"{result.rows[0].lengths[-1]:,}"
    horizon = "" if result.horizon is None else f"horizon {result.horizon:.3f}, "
    table = make_table(
        f"Gaussian tokens, 50 dimensions, {horizon}{title_end(result)}",
        f"at {longest} tokens; effective: 1/Σp²; floor: the last nine tenths of them gain less than a tenth",
    )
    for name in ("prior", "effective", "measured", "predicted", "ratio", "floor"):
        table.add_column(name, justify="left" if name == "prior" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.prior,
            f"{row.effective[-1]:,.1f}",
            f"{row.measured[-1]:.4f} ± {row.measured_se[-1]:.4f}",
            f"{row.predicted[-1]:.4f}",
            f"{row.ratio:.3f}",
            "yes" if row.floored else "no",
        )
    worst = max(abs(row.ratio - 1) for row in result.rows)
    return [table, f"Largest deviation from the prediction at {longest} tokens: {worst:.1%}."]


def figures(result: Floors, folder: Path) -> list[Path]:
    """Error against tokens: lines are predicted from effective tokens, points are measured."""
    figure = make_figure(width=9, height=5)
    axes = figure.add_subplot(1, 1, 1)
    for index, row in enumerate(result.rows):
        axes.plot(row.lengths, row.predicted, linewidth=1.2, **line_style(index))
        points = {**line_style(index, mark=True), "linestyle": "none"}
        axes.plot(row.lengths, row.measured, markersize=5, label=row.prior, **points)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="error of a query (points: measured, lines: predicted)"
    )
    axes.grid(alpha=0.25)
    legend_beside(axes)
    return save_figure(figure, folder / "convergence-prior")


def chart(result: Floors) -> Markup:
    lines = {row.prior: zip(row.lengths, row.measured, strict=True) for row in result.rows}
    return error_chart("error of a query, by prior", lines)
