"""Rates of both moments as a table, a picture, and a section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.tables import make_table, with_error
from bayesattn.studies.convergence.drawing import against_tokens, error_chart, finish_slopes, slopes
from bayesattn.studies.convergence.moments.run import Moments, Rate
from bayesattn.studies.convergence.replicates import title_end


def tables(result: Moments) -> list[Table | str]:
    parts: list[Table | str] = [_table(result)]
    if result.deviation is not None and result.checked_scale is not None:
        parts.append(
            f"Attention over 1,000,000 tokens is {result.deviation:.2f} of its own standard errors from the closed "
            f"form (scale {result.checked_scale:.3g}, 64 queries)."
        )
    if result.speed is not None:
        parts.append(
            "One replicate: {seconds:.1f} s for {scales} scales; a loop over dense attention, all tokens as queries, "
            "{dense_seconds:.1f} s for one of them: {ratio:.0f} times that. With all tokens as queries both agree to "
            "{error:.0e}.".format(scales=len(result.rows), **result.speed)
        )
    return parts


def _table(result: Moments) -> Table:
    """Rates of both moments by horizon, and the errors at the longest length."""
    longest = f"{result.lengths[-1]:,}"
    table = make_table(
        f"Tokens of a {result.law}, {result.dimension} dimensions, {title_end(result)}",
        f"error ∝ n^slope; ± standard errors; errors: root mean square at {longest} tokens",
        columns=("scale", "horizon", "mean: slope", "error", "covariance: slope", "error"),
    )
    for row in result.rows:
        table.add_row(
            f"{row.scale:.3g}",
            f"{row.horizon:.4f}",
            with_error(row.slope_mean, row.slope_mean_se),
            f"{row.errors_mean[-1]:.2e}",
            with_error(row.slope_cov, row.slope_cov_se),
            f"{row.errors_cov[-1]:.2e}",
        )
    return table


def _shown(rows: Sequence[Rate]) -> Sequence[Rate]:
    """At most six of the scales."""
    return rows if len(rows) <= 6 else [rows[round(i * (len(rows) - 1) / 5)] for i in range(6)]


def figures(result: Moments, folder: Path) -> list[Path]:
    """Errors of both moments against n, one line per horizon, and slopes against the horizon."""
    figure, shown = make_figure(width=14, height=4.8), _shown(result.rows)
    for at, (title, field) in enumerate([("mean", "errors_mean"), ("covariance", "errors_cov")]):
        lines = {f"H = {row.horizon:.3g}": getattr(row, field) for row in shown}
        axes = figure.add_subplot(1, 3, at + 1)
        against_tokens(axes, f"{result.law}: error of the {title}", result.lengths, lines)
    axes = figure.add_subplot(1, 3, 3)
    horizons = [row.horizon for row in result.rows]
    slopes(axes, horizons, [(row.slope_mean, row.slope_mean_se) for row in result.rows], "mean", 0)
    slopes(axes, horizons, [(row.slope_cov, row.slope_cov_se) for row in result.rows], "covariance", 1)
    finish_slopes(axes)
    return save_figure(figure, folder / f"convergence-{result.law}")


def chart(result: Moments) -> Markup:
    lines = {f"H = {row.horizon:.3g}": zip(result.lengths, row.errors_mean, strict=True) for row in _shown(result.rows)}
    return error_chart(f"{result.law}: error of the mean", lines)
