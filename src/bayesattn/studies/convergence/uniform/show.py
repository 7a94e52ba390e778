"""Rates by radius as a table, a picture, and a section of the page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.palette import colour
from bayesattn.drawing.tables import make_table, with_error
from bayesattn.studies.convergence.drawing import against_tokens, error_chart
from bayesattn.studies.convergence.replicates import title_end
from bayesattn.studies.convergence.uniform.run import Uniform


def tables(result: Uniform) -> list[Table | str]:
    title = f"Largest error over a ball, {result.law} in {result.dimension} dimensions, {title_end(result)}"
    table = make_table(title, "C: of error = C/√n; ± standard errors", columns=("radius", "slope", "C"))
    for row in result.rows:
        table.add_row(f"{row.radius:g}", with_error(row.slope, row.slope_se), f"{row.constant:.3g}")
    if result.growth is None:
        return [table, "The growth of C is unknown: errors fall as 1/√n at fewer than 3 radii."]
    growth = result.growth
    unexplained = ", ".join(f"{shape} leaves {share:.1%}" for shape, share in growth.unexplained.items())
    return [
        table,
        f"C grows as {' or '.join(growth.likely)}: {unexplained} of its variation unexplained, over {growth.radii} "
        "radii whose errors fall as 1/√n.",
    ]


def figures(result: Uniform, folder: Path) -> list[Path]:
    """Largest error against n, one line per radius, and the constant against the radius."""
    figure = make_figure(width=10, height=4.5)
    lines = {f"R = {row.radius:g}": row.errors for row in result.rows}
    against_tokens(figure.add_subplot(1, 2, 1), f"{result.law}: largest error on the ball", result.lengths, lines)
    axes = figure.add_subplot(1, 2, 2)
    axes.plot([row.radius for row in result.rows], [row.constant for row in result.rows], marker="o", color=colour(0))
    axes.set(title="C(R) of error = C(R)/√n", yscale="log", xlabel="radius R")
    axes.grid(alpha=0.25, which="both")
    return save_figure(figure, folder / "convergence-uniform")


def chart(result: Uniform) -> Markup:
    lines = {f"R = {row.radius:g}": zip(result.lengths, row.errors, strict=True) for row in result.rows}
    return error_chart(f"{result.law}: largest error", lines)
