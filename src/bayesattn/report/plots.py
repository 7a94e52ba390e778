"""Pictures, each saved as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesattn.benchmarks.attention import FORWARD, TRAINING, Row
from bayesattn.benchmarks.long import Decode, Prefill
from bayesattn.evaluation.intervals import wilson
from bayesattn.files import write_whole
from bayesattn.priors import Prior

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bayesattn.evaluation.heads import Posterior
    from bayesattn.evaluation.perplexity import Row as PerplexityRow
    from bayesattn.evaluation.trials import Cell

# Each line also has its own dash, for colour-blind readers and for print in grey.
COLOURS = ["#0b6e99", "#d1495b", "#2e8540", "#8e6bbf", "#c77d11", "#4a4a4a", "#00a6a6", "#a0522d"]
DASHES: list[Any] = ["-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (4, 1)), (0, (8, 3)), "-."]

MARKERS = "os^DvP*X"
DEPTHS = 10  # fields of a heat map


def gallery(priors: Mapping[str, Prior], n: int, path: Path) -> list[Path]:
    """The prior of every head, relative to its peak, against distance on a logarithmic axis."""
    columns = 3
    rows = -(-len(priors) // columns)
    figure = make_figure(width=4.6 * columns, height=3.6 * rows)
    distance = torch.unique(torch.logspace(0, torch.tensor(float(n)).log10(), 400).round().long()) - 1
    for index, (name, prior) in enumerate(priors.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        log_p = prior.log_probability(n)
        relative = (log_p - log_p.amax(-1, keepdim=True)).exp()[:, distance]
        for head, summary in enumerate(prior.describe(n)):
            axes.plot(
                distance + 1,
                relative[head],
                color=COLOURS[head % len(COLOURS)],
                linestyle=DASHES[head % len(DASHES)],
                label=f"{summary.kind}: 99.9% within {summary.span:,}, {summary.effective_tokens:,.0f} effective",
            )
        family = type(prior).__name__
        title = name if name == family else f"{name} ({family})"
        axes.set(title=title, xscale="log", ylim=(-0.03, 1.08), xlim=(1, n))
        axes.set_xlabel("distance + 1 (tokens)")
        axes.set_ylabel("prior, relative to its peak")
        axes.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    figure.suptitle(f"What each head believes about distance, over {n:,} tokens")
    return save_figure(figure, path)


def attention(rows: Sequence[Row], path: Path) -> list[Path]:
    """Seconds against tokens for both phases, and peak memory of training; all axes logarithmic."""
    figure = make_figure(width=15, height=4.8)
    methods = list(dict.fromkeys(row.method for row in rows))
    for index, (title, phase, field) in enumerate(
        [
            ("forward", FORWARD, "seconds"),
            (TRAINING, TRAINING, "seconds"),
            ("memory, " + TRAINING, TRAINING, "peak_bytes"),
        ]
    ):
        axes = figure.add_subplot(1, 3, index + 1)
        for position, method in enumerate(methods):
            _line(
                axes,
                method,
                [
                    (row.tokens, (getattr(row, field) or 0) / (1e6 if field == "peak_bytes" else 1))
                    for row in rows
                    if row.phase == phase and row.method == method
                ],
                position,
            )
        label = "seconds" if field == "seconds" else "MB above the inputs"
        _log_log(axes, title, label, [row.tokens for row in rows])
    return save_figure(figure, path)


def long(rows: Sequence[Prefill], decoded: Sequence[Decode], path: Path) -> list[Path]:
    """Seconds and memory of prefill, tokens per second of decoding and bytes of cache; all axes logarithmic."""
    figure = make_figure(width=13, height=9)
    mixes = list(dict.fromkeys([*(row.mix for row in rows), *(row.mix for row in decoded)]))
    prefill = [row.tokens for row in rows]
    decode = [row.tokens for row in decoded]
    plain = {"plain SDPA, no prior": [(row.tokens, row.dense_seconds) for row in rows if row.mix == mixes[0]]}
    full = [row for row in decoded if row.mix == mixes[0]]
    panels: list[tuple[str, str, list[int], dict[str, Any]]] = [
        (
            "prefill",
            "seconds",
            prefill,
            plain | {mix: [(row.tokens, row.pruned_seconds) for row in rows if row.mix == mix] for mix in mixes},
        ),
        (
            "memory of prefill",
            "MB above the inputs",
            prefill,
            {mix: [(row.tokens, (row.peak_bytes or 0) / 1e6) for row in rows if row.mix == mix] for mix in mixes},
        ),
        (
            "decoding",
            "tokens per second",
            decode,
            {"full cache, plain SDPA": [(row.tokens, row.full_tokens_per_second) for row in full]}
            | {mix: [(row.tokens, row.cache_tokens_per_second) for row in decoded if row.mix == mix] for mix in mixes},
        ),
        (
            "cache of one layer",
            "MB",
            decode,
            {"full cache, plain SDPA": [(row.tokens, row.full_bytes / 1e6) for row in full]}
            | {mix: [(row.tokens, row.cache_bytes / 1e6) for row in decoded if row.mix == mix] for mix in mixes},
        ),
    ]
    for index, (title, label, lengths, lines) in enumerate(panels):
        axes = figure.add_subplot(2, 2, index + 1)
        for name, points in lines.items():
            position = 3 if "SDPA" in name else mixes.index(name)
            _line(axes, name, points, position)
        _log_log(axes, title, label, lengths)
    return save_figure(figure, path)


def passkey(results: Mapping[str, Sequence[Cell]], train_length: int, path: Path) -> list[Path]:
    """Accuracy against length, one line per model, with 95% intervals; lengths without trials are left out."""
    figure = make_figure(width=9, height=4.8)
    axes = figure.add_subplot(1, 1, 1)
    lengths = sorted({cell.length for cells in results.values() for cell in cells})
    for position, (name, cells) in enumerate(results.items()):
        tried = [cell for cell in cells if cell.trials]
        shares = [cell.right / cell.trials for cell in tried]
        bounds = [wilson(cell.right, cell.trials) for cell in tried]
        axes.errorbar(
            [
                cell.length * 1.02 ** (position - len(results) / 2) for cell in tried
            ],  # apart, so that none hides another
            shares,
            yerr=[
                [max(0.0, share - low) for share, (low, _) in zip(shares, bounds, strict=True)],
                [max(0.0, high - share) for share, (_, high) in zip(shares, bounds, strict=True)],
            ],
            marker=MARKERS[position % len(MARKERS)],
            markersize=5,
            capsize=2,
            color=COLOURS[position % len(COLOURS)],
            linestyle=DASHES[position % len(DASHES)],
            label=name,
        )
    axes.axvline(train_length, color="#999999", linewidth=1)
    axes.annotate("trained here", (train_length, 1.06), fontsize=8, color="#666666", ha="left")
    axes.set(xscale="log", ylim=(-0.04, 1.12), xlabel="tokens of the prompt", ylabel="keys found, all digits right")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path)


def passkey_depths(cells: Sequence[Cell], name: str, path: Path) -> list[Path]:
    """Accuracy by depth and length; each field has the share and the number of trials."""
    tried = [cell for cell in cells if cell.trials]
    figure = make_figure(width=2.2 + 0.9 * len(tried), height=5)
    axes = figure.add_subplot(1, 1, 1)
    shares = torch.full((DEPTHS, max(1, len(tried))), float("nan"))
    for column, cell in enumerate(tried):
        for row in range(DEPTHS):
            scores = [right for depth, right in cell.outcomes if min(DEPTHS - 1, int(depth * DEPTHS)) == row]
            if scores:
                shares[row, column] = sum(scores) / len(scores)
                colour = "white" if shares[row, column] > 0.5 else "black"
                label = f"{shares[row, column]:.0%}\nof {len(scores)}"
                axes.text(column, row, label, ha="center", va="center", fontsize=6.5, color=colour)
    axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(tried)), [f"{cell.length:,}" for cell in tried], rotation=45)
    axes.set_yticks(range(DEPTHS), [f"{row * 100 // DEPTHS}–{(row + 1) * 100 // DEPTHS}%" for row in range(DEPTHS)])
    axes.set(title=f"{name}: keys found", xlabel="tokens of the prompt", ylabel="depth of the key")
    return save_figure(figure, path)


def perplexity(results: Mapping[str, Sequence[PerplexityRow]], label: str, path: Path) -> list[Path]:
    """Perplexity against context or position, one line per model, with 95% intervals."""
    figure = make_figure(width=9, height=4.8)
    axes = figure.add_subplot(1, 1, 1)
    contexts = sorted({row.context for rows in results.values() for row in rows})
    for position, (name, rows) in enumerate(results.items()):
        colour = COLOURS[position % len(COLOURS)]
        at = [row.context for row in rows]
        axes.fill_between(at, [row.low for row in rows], [row.high for row in rows], color=colour, alpha=0.15)
        style = {"marker": MARKERS[position % len(MARKERS)], "linestyle": DASHES[position % len(DASHES)]}
        axes.plot(at, [row.perplexity for row in rows], markersize=5, color=colour, label=name, **style)
    axes.set(xlabel=label, ylabel="perplexity", yscale="log")
    axes.set_xscale("symlog", linthresh=max(1, min((c for c in contexts if c), default=1)))
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=45)
    axes.set_xlim(left=min(contexts) * 0.9 - 0.1 * min((c for c in contexts if c), default=1) * (min(contexts) == 0))
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.yaxis.set_major_formatter("{x:g}")
    shown = [row.perplexity for rows in results.values() for row in rows]
    axes.yaxis.set_minor_formatter("{x:g}" if max(shown) < 10 * min(shown) else "")
    axes.grid(alpha=0.25, which="both", axis="y")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path)


def posteriors(rows: Sequence[Posterior], path: Path) -> list[Path]:
    """Measured attention of each head by distance, and its prior if there is one, one panel per layer; both axes
    logarithmic."""
    columns = min(3, len(rows))
    figure = make_figure(width=4.6 * columns, height=4.0 * -(-len(rows) // columns))
    for index, row in enumerate(rows):
        axes = figure.add_subplot(-(-len(rows) // columns), columns, index + 1)
        # Bins that widen with the distance keep the lines readable.
        edges = torch.logspace(0, math.log10(row.profile.shape[1] + 1), 60).long().unique()
        distance = (edges[:-1] * (edges[1:] - 1)).sqrt()

        def binned(values: Tensor, edges: Tensor = edges) -> Tensor:
            return torch.stack([values[a - 1 : b - 1].mean() for a, b in pairwise(edges.tolist())]).clamp(min=1e-9)

        for head, profile in enumerate(row.profile):
            colour = COLOURS[head % len(COLOURS)]
            axes.plot(distance, binned(profile), color=colour, linewidth=1.2, label=f"head {head}")
            if row.prior is not None:
                axes.plot(distance, binned(row.prior[head]), color=colour, linewidth=1.2, linestyle="--")
        axes.set(title=f"layer {row.layer + 1}", xscale="log", yscale="log", ylim=(1e-6, 1.5))
        axes.set_xlabel("distance + 1 (tokens)")
        axes.set_ylabel("mean attention" + ("" if row.prior is None else " (dashed: prior)"))
        axes.grid(alpha=0.25)
        if len(row.profile) <= len(COLOURS):
            axes.legend(fontsize=6.5, frameon=False)
    return save_figure(figure, path)


def savings_map(
    shares: Sequence[Sequence[float]], names: Sequence[str], lengths: Sequence[int], short: int, path: Path
) -> list[Path]:
    """The share of FLOPs saved by training at `short` instead of a longer context, by model and context."""
    figure = make_figure(width=2.5 + 0.85 * len(lengths), height=1.6 + 0.38 * len(names))
    axes = figure.add_subplot(1, 1, 1)
    axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            colour = "white" if share > 0.5 else "black"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(names)), names)
    axes.set(title=f"FLOPs saved by training at {short:,} tokens instead", xlabel="context (tokens)")
    return save_figure(figure, path)


def _line(axes: Axes, name: str, points: Sequence[tuple[int, float | None]], position: int) -> None:
    measured = [(x, y) for x, y in points if y]
    if measured:
        axes.plot(
            *zip(*measured, strict=True),
            marker="o",
            markersize=4,
            color=COLOURS[position % len(COLOURS)],
            linestyle=DASHES[position % len(DASHES)],
            label=name,
        )


def _log_log(axes: Axes, title: str, label: str, lengths: Sequence[int]) -> None:
    axes.set(title=title, xscale="log", yscale="log", xlabel="tokens", ylabel=label)
    lengths = sorted(set(lengths))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def make_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'bayesattn[plot]'") from missing
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save a figure as PNG and as SVG."""
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in written:
        picture = BytesIO()
        figure.savefig(picture, format=target.suffix[1:], dpi=150)
        write_whole(target, picture.getvalue())
    return written
