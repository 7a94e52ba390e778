"""Pictures with matplotlib, each saved as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from bayesattn.drawing.palette import line_style
from bayesattn.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'bayesattn[plot]'") from missing
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save a figure as PNG and as SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target, metadata in zip(written, ({}, {"Date": None}), strict=True):
        picture = BytesIO()
        with rc_context({"svg.hashsalt": path.name}):
            figure.savefig(picture, format=target.suffix[1:], dpi=150, metadata=metadata)
        write_whole(target, picture.getvalue())
    return written


def ticks_at(axes: Axes, lengths: Sequence[int]) -> None:
    """Numbers of tokens at these lengths, and nowhere else."""
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def legend_beside(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def lines_by_length(
    axes: Axes, title: str, label: str, lines: Mapping[str, Sequence[tuple[int, float | None]]], numbers: Sequence[int]
) -> None:
    """Lines over numbers of tokens, both axes logarithmic; points without a value are left out."""
    for number, (name, points) in zip(numbers, lines.items(), strict=True):
        if measured := [(x, y) for x, y in points if y]:
            axes.plot(*zip(*measured, strict=True), **{**line_style(number), "marker": "o"}, markersize=4, label=name)
    axes.set(title=title, xscale="log", yscale="log", xlabel="tokens", ylabel=label)
    ticks_at(axes, sorted({x for points in lines.values() for x, _ in points}))
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def share_map(
    axes: Axes, shares: Sequence[Sequence[float | None]], labels: Sequence[Sequence[str]], size: float
) -> None:
    """A heat map of shares from 0 to 1, with a label in each field that has a share."""
    axes.imshow(
        [[float("nan") if x is None else x for x in row] for row in shares], vmin=0, vmax=1, cmap="Blues", aspect="auto"
    )
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share is not None:
                colour = "white" if share > 0.5 else "black"
                axes.text(column, row, labels[row][column], ha="center", va="center", fontsize=size, color=colour)
