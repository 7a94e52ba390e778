"""Rates of the layers of a model as a table, a picture, and a section of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.tables import make_table, with_error
from bayesattn.files import short_name
from bayesattn.studies.convergence.drawing import finish_slopes, slopes
from bayesattn.studies.convergence.model.run import ModelRates
from bayesattn.studies.convergence.replicates import title_end


def tables(result: ModelRates) -> list[Table | str]:
    return [
        _table(result),
        *(
            f"{moment}: rank correlation of slope with horizon over heads {rho:+.2f}; {chance:.2g} of random orders "
            "are as far from zero"
            for moment, (rho, chance) in result.rank_correlation.items()
        ),
    ]


def _table(result: ModelRates) -> Table:
    """One line per layer, and the range over its heads."""
    samples = f"{result.sampling} samples of {result.lengths[0]:,} to {result.lengths[-1]:,}"
    table = make_table(
        f"{short_name(result.model)}: {result.tokens:,} tokens of text, {samples}, {title_end(result)}",
        "error ∝ n^slope; ± standard errors; heads: smallest and largest",
        columns=("layer", "horizon", "of heads", "mean: slope", "of heads", "cov.: slope"),
    )
    for layer in (row for row in result.rows if row.head is None):
        heads = [row for row in result.rows if row.layer == layer.layer and row.head is not None]
        table.add_row(
            str(layer.layer + 1),
            f"{layer.horizon:.2f}",
            _range([row.horizon for row in heads]),
            with_error(layer.slope_mean, layer.slope_mean_se),
            _range([row.slope_mean for row in heads]),
            with_error(layer.slope_cov, layer.slope_cov_se),
        )
    return table


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


def figures(result: ModelRates, folder: Path) -> list[Path]:
    """Slope against horizon: one point per head, one colour and shape per layer."""
    figure = make_figure(width=12, height=4.8)
    for at, (title, slope) in enumerate([("mean", "slope_mean"), ("covariance", "slope_cov")]):
        axes = figure.add_subplot(1, 2, at + 1)
        for layer in dict.fromkeys(row.layer for row in result.rows):
            heads = [row for row in result.rows if row.layer == layer and row.head is not None]
            points = [(getattr(row, slope), getattr(row, f"{slope}_se")) for row in heads]
            slopes(axes, [row.horizon for row in heads], points, f"layer {layer + 1}", layer, line=False)
        finish_slopes(axes, f"{short_name(result.model)}: {title}")
    return save_figure(figure, folder / "convergence-model")
