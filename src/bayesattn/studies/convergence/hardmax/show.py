"""Both fits as a table, a picture, and a section of the page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.tables import make_table, with_error
from bayesattn.studies.convergence.drawing import against_tokens, error_chart
from bayesattn.studies.convergence.hardmax.run import Hardmax
from bayesattn.studies.convergence.replicates import title_end


def tables(result: Hardmax) -> list[Table | str]:
    table = make_table(
        f"Relative error of a query, {result.law} in {result.dimension} dimensions, {title_end(result)}",
        "sharpness: standard deviation of logits; misfit: squared residuals in standard errors, less is better",
        columns=("sharpness", "n^a: a", "misfit", "(log n)^b: b", "misfit", "the data prefer"),
    )
    for row in result.rows:
        table.add_row(
            "∞ (hardmax)" if row.sharpness is None else f"{row.sharpness:g}",
            with_error(row.power, row.power_se),
            f"{row.power_misfit:,.0f}",
            with_error(row.logarithmic, row.logarithmic_se),
            f"{row.logarithmic_misfit:,.0f}",
            row.preferred,
        )
    return [table]


def figures(result: Hardmax, folder: Path) -> list[Path]:
    """Relative error against n, one line per sharpness; a power law is straight on these axes."""
    figure = make_figure(width=7, height=4.5)
    lines = {row.name: row.errors for row in result.rows}
    against_tokens(figure.add_subplot(1, 1, 1), f"{result.law}: relative error of one query", result.lengths, lines)
    return save_figure(figure, folder / "convergence-hardmax")


def chart(result: Hardmax) -> Markup:
    lines = {row.name: zip(result.lengths, row.errors, strict=True) for row in result.rows}
    return error_chart(f"{result.law}: relative error", lines)
