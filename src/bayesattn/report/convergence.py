"""Tables and figures of the convergence studies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from bayesattn.convergence.advise import Advice
from bayesattn.convergence.effective_tokens import Row as PriorRow
from bayesattn.convergence.hardmax import Temperature
from bayesattn.convergence.layers import Row as LayerRow
from bayesattn.convergence.moments import Row as MomentRow
from bayesattn.convergence.uniform import Radius
from bayesattn.report.plots import COLOURS, DASHES, MARKERS, make_figure, save_figure
from bayesattn.report.tables import make_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HALF = "1/√n"


def moments_table(rows: Sequence[MomentRow], grid: Sequence[int], title: str) -> Table:
    """Rates of both moments by horizon, and the errors at the longest length."""
    table = make_table(title, f"error ∝ n^slope; ± standard errors; errors: root mean square at {grid[-1]:,} tokens")
    for name in ("scale", "horizon", "mean: slope", "error", "covariance: slope", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.scale:.3g}",
            f"{row.horizon:.4f}",
            _measured(row.slope_mean, row.slope_mean_se),
            f"{row.errors_mean[-1]:.2e}",
            _measured(row.slope_cov, row.slope_cov_se),
            f"{row.errors_cov[-1]:.2e}",
        )
    return table


def moments_plot(rows: Sequence[MomentRow], grid: Sequence[int], name: str, path: Path) -> list[Path]:
    """Errors of both moments against n, one line per horizon, and slopes against the horizon."""
    figure = make_figure(width=14, height=4.8)
    for at, (title, field) in enumerate([("mean", "errors_mean"), ("covariance", "errors_cov")]):
        axes = figure.add_subplot(1, 3, at + 1)
        shown = rows if len(rows) <= 6 else [rows[round(i * (len(rows) - 1) / 5)] for i in range(6)]
        lines = {f"H = {row.horizon:.3g}": getattr(row, field) for row in shown}
        _against_tokens(axes, f"{name}: error of the {title}", grid, lines)
    axes = figure.add_subplot(1, 3, 3)
    horizons = [row.horizon for row in rows]
    for index, (label, slope, error) in enumerate(
        [("mean", "slope_mean", "slope_mean_se"), ("covariance", "slope_cov", "slope_cov_se")]
    ):
        _slopes(axes, horizons, [(getattr(row, slope), getattr(row, error)) for row in rows], label, index)
    _finish_slopes(axes)
    axes.set(xscale="log")
    return save_figure(figure, path)


def radius_table(rows: Sequence[Radius], title: str) -> Table:
    table = make_table(title, "C: of error = C/√n; ± standard errors")
    for name in ("radius", "slope", "C"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(f"{row.radius:g}", _measured(row.slope, row.slope_se), f"{row.constant:.3g}")
    return table


def radius_plot(rows: Sequence[Radius], grid: Sequence[int], name: str, path: Path) -> list[Path]:
    """Largest error against n, one line per radius, and the constant against the radius."""
    figure = make_figure(width=10, height=4.5)
    axes = figure.add_subplot(1, 2, 1)
    _against_tokens(
        axes, f"{name}: largest error on the ball", grid, {f"R = {row.radius:g}": row.errors for row in rows}
    )
    axes = figure.add_subplot(1, 2, 2)
    axes.plot([row.radius for row in rows], [row.constant for row in rows], marker="o", color=COLOURS[0])
    axes.set(title="C(R) of error = C(R)/√n", yscale="log", xlabel="radius R")
    axes.grid(alpha=0.25, which="both")
    return save_figure(figure, path)


def temperature_table(rows: Sequence[Temperature], title: str) -> Table:
    table = make_table(
        title, "sharpness: standard deviation of logits; misfit: squared residuals in standard errors, less is better"
    )
    for name in ("sharpness", "n^a: a", "misfit", "(log n)^b: b", "misfit", "the data prefer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            "∞ (hardmax)" if math.isinf(row.sharpness) else f"{row.sharpness:g}",
            _measured(row.power, row.power_se),
            f"{row.power_misfit:,.0f}",
            _measured(row.logarithmic, row.logarithmic_se),
            f"{row.logarithmic_misfit:,.0f}",
            row.preferred,
        )
    return table


def temperature_plot(rows: Sequence[Temperature], grid: Sequence[int], name: str, path: Path) -> list[Path]:
    """Relative error against n, one line per sharpness; a power law is straight on these axes."""
    figure = make_figure(width=7, height=4.5)
    axes = figure.add_subplot(1, 1, 1)
    lines = {"hardmax" if math.isinf(row.sharpness) else f"sharpness {row.sharpness:g}": row.errors for row in rows}
    _against_tokens(axes, f"{name}: relative error of one query", grid, lines)
    return save_figure(figure, path)


def layers_table(rows: Sequence[LayerRow], title: str) -> Table:
    """One line per layer, and the range over its heads."""
    table = make_table(title, "error ∝ n^slope; ± standard errors; heads: smallest and largest")
    for name in ("layer", "horizon", "of heads", "mean: slope", "of heads", "cov.: slope"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in (row for row in rows if row.head is None):
        heads = [row for row in rows if row.layer == layer.layer and row.head is not None]
        table.add_row(
            str(layer.layer + 1),
            f"{layer.horizon:.2f}",
            _range([row.horizon for row in heads]),
            _measured(layer.slope_mean, layer.slope_mean_se),
            _range([row.slope_mean for row in heads]),
            _measured(layer.slope_cov, layer.slope_cov_se),
        )
    return table


def layers_plot(rows: Sequence[LayerRow], name: str, path: Path) -> list[Path]:
    """Slope against horizon: one point per head, one colour and shape per layer."""
    figure = make_figure(width=12, height=4.8)
    for at, (title, slope) in enumerate([("mean", "slope_mean"), ("covariance", "slope_cov")]):
        axes = figure.add_subplot(1, 2, at + 1)
        for layer in dict.fromkeys(row.layer for row in rows):
            heads = [row for row in rows if row.layer == layer and row.head is not None]
            points = [(getattr(row, slope), getattr(row, f"{slope}_se")) for row in heads]
            _slopes(axes, [row.horizon for row in heads], points, f"layer {layer + 1}", layer, line=False)
        _finish_slopes(axes)
        axes.set(title=f"{name}: {title}", xscale="log")
    return save_figure(figure, path)


def prior_table(rows: Sequence[PriorRow], title: str) -> Table:
    longest = rows[0].lengths[-1]
    caption = f"at {longest:,} tokens; effective: 1/Σp²; floor: the last nine tenths of them gain less than a tenth"
    table = make_table(title, caption)
    for name in ("prior", "effective", "measured", "predicted", "ratio", "floor"):
        table.add_column(name, justify="left" if name == "prior" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.prior,
            f"{row.effective[-1]:,.1f}",
            f"{row.measured[-1]:.4f} ± {row.measured_se[-1]:.4f}",
            f"{row.predicted[-1]:.4f}",
            f"{row.ratio:.3f}",
            "yes" if row.floored else "no",
        )
    return table


def prior_plot(rows: Sequence[PriorRow], path: Path) -> list[Path]:
    """Error against tokens: lines are predicted from effective tokens, points are measured."""
    figure = make_figure(width=9, height=5)
    axes = figure.add_subplot(1, 1, 1)
    for index, row in enumerate(rows):
        colour = COLOURS[index % 8]
        axes.plot(row.lengths, row.predicted, color=colour, linestyle=DASHES[index % 8], linewidth=1.2)
        marker = MARKERS[index % 8]
        axes.plot(
            row.lengths, row.measured, color=colour, marker=marker, markersize=5, linestyle="none", label=row.prior
        )
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="error of a query (points: measured, lines: predicted)"
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path)


def advice_table(advice: Advice, name: str) -> Table:
    table = make_table(
        f"{name}: what its heads make of {advice.length:,} tokens",
        "tokens: effective, 1/Σp², of the prior and of the attention on this text; growth: of the former over the "
        "second half; "
        f"reach: tokens that are enough for 95% of queries, up to a change by {advice.delta:g} of the largest value; "
        "certain: as the prior proves",
    )
    for column in ("layer", "head"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for column in ("prior\ntokens", "\ngrowth", "attn\ntokens", "\nreach", "\ncertain"):
        table.add_column(column, justify="right", no_wrap=True)
    for head in advice.heads:
        table.add_row(
            str(head.layer + 1),
            str(head.head),
            head.kind or "–",
            "–" if head.prior_effective is None else f"{head.prior_effective:,.1f}",
            "–" if head.prior_growth is None else f"{head.prior_growth:.2f}×",
            f"{head.effective:,.1f}",
            "all" if head.reach == advice.length else f"{head.reach:,}",
            "–" if head.certain is None else f"{head.certain:,}",
        )
    return table


def _against_tokens(axes: Axes, title: str, grid: Sequence[int], lines: Mapping[str, Sequence[float]]) -> None:
    """Errors by name against n, both axes logarithmic."""
    for index, (label, errors) in enumerate(lines.items()):
        style = {"color": COLOURS[index % 8], "linestyle": DASHES[index % 8], "marker": MARKERS[index % 8]}
        axes.plot(grid, errors, markersize=4, label=label, **style)
    axes.set(title=title, xscale="log", yscale="log", xlabel="tokens n")
    shown = [grid[0], grid[len(grid) // 2], grid[-1]]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def _slopes(
    axes: Axes,
    horizons: Sequence[float],
    slopes: Sequence[tuple[float, float]],
    label: str,
    index: int,
    line: bool = True,
) -> None:
    axes.errorbar(
        horizons,
        [slope for slope, _ in slopes],
        yerr=[1.96 * error for _, error in slopes],
        linestyle=DASHES[index % 8] if line else "none",
        marker=MARKERS[index % 8],
        color=COLOURS[index % 8],
        markersize=5,
        capsize=2,
        label=label,
    )


def _finish_slopes(axes: Axes) -> None:
    axes.axhline(-0.5, color="#999999", linewidth=1)
    axes.annotate(
        HALF, (0.99, -0.5), xycoords=("axes fraction", "data"), fontsize=8, color="#666666", va="bottom", ha="right"
    )
    axes.set(title="slope against horizon", xlabel="horizon H", ylabel="slope, 95% intervals")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _measured(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"
