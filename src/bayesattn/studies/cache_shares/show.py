"""What a share of the cache costs, as a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from bayesattn.drawing.figures import make_figure, save_figure
from bayesattn.drawing.palette import line_style
from bayesattn.drawing.tables import make_table
from bayesattn.evaluation.intervals import half_interval
from bayesattn.files import short_name
from bayesattn.studies.cache_shares.run import FITTED, FULL, WINDOW, CacheShares, Way

READ = {
    "windows": "windows act while a prompt is read",
    "full": "prompts are read with the full cache, which is cut afterwards",
}


def tables(result: CacheShares) -> list[Table | str]:
    table = make_table(
        f"{short_name(result.model)}: what a share of the cache costs",
        f"{READ[result.prefill]}; MB: held after the prompt; perpl.: perplexity of the next {result.scored:,} tokens; "
        "change: of that from the full cache in percent, with its paired 95% interval; KL: divergence from the "
        "predictions with the full cache, nats a token; key: pass keys found",
    )
    for heading in ("prompt", "cache", "MB", "share", "perpl.", "change", "KL", "key"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
    notes = []
    for length in sorted({way.length for way in result.ways}):
        ways = [way for way in result.ways if way.length == length]
        full = next(way for way in ways if way.method == FULL)
        measurable = is_measurable(full)
        if not measurable:
            found = f"{sum(full.found)} of {len(full.found)}"
            notes.append(f"Pass keys at {length:,} tokens: not measurable, the full cache finds {found}.")
        if table.rows:
            table.add_section()
        for way in sorted(ways, key=lambda each: (-(each.keep or 1.0), each.method)):
            table.add_row(
                f"{length:,}" if way is full else "",
                way.name,
                f"{way.bytes / 1e6:,.1f}",
                f"{way.bytes / full.bytes:.0%}",
                f"{way.perplexity:.2f}",
                "" if way is full else change_text(way.losses, full.losses),
                "" if way is full else f"{np.mean(way.divergences):.3f}",
                f"{sum(way.found)} of {len(way.found)}" if measurable else "–",
            )
    return [table, *notes]


def change(losses: Sequence[float], full: Sequence[float]) -> tuple[float, float, float]:
    """The relative change of perplexity from the full cache on the same prompts, and its 95% interval."""
    difference = np.array(losses) - np.array(full)
    mean = float(difference.mean())
    half = half_interval(difference) if len(difference) > 1 else math.inf
    return math.expm1(mean), math.expm1(mean - half), math.expm1(min(mean + half, 700.0))


def change_text(losses: Sequence[float], full: Sequence[float]) -> str:
    """`change` in percent."""
    mean, low, high = (100 * each for each in change(losses, full))
    return f"{mean:+.1f} ({low:+.1f} … {high:+.1f})" if high < 1e6 else f"{mean:+.1f}"


def figures(result: CacheShares, folder: Path) -> list[Path]:
    """Change of perplexity, and keys found, against the share of bytes held; a column for each length."""
    lengths = sorted({way.length for way in result.ways})
    figure = make_figure(width=4.2 * len(lengths), height=6.0)
    for column, length in enumerate(lengths):
        ways = [way for way in result.ways if way.length == length]
        full = next(way for way in ways if way.method == FULL)
        upper = figure.add_subplot(2, len(lengths), column + 1)
        lower = figure.add_subplot(2, len(lengths), len(lengths) + column + 1)
        for number, method in enumerate((FITTED, WINDOW)):
            chosen = sorted((way for way in ways if way.method == method), key=lambda way: way.bytes)
            shares = [100 * way.bytes / full.bytes for way in chosen]
            changes = [[100 * each for each in change(way.losses, full.losses)] for way in chosen]
            _line(upper, shares, changes, number, {FITTED: "fitted windows", WINDOW: "one window for all"}[method])
            if is_measurable(full):
                lower.plot(shares, [_found(way) for way in chosen], **line_style(number, mark=True))
        if is_measurable(full):
            lower.axhline(_found(full), color="grey", linewidth=0.8)
        else:
            lower.text(0.5, 0.5, "not measurable", ha="center", color="grey", transform=lower.transAxes)
        upper.axhline(0.0, color="grey", linewidth=0.8)
        upper.set(title=f"{length:,} tokens", ylabel="change of perplexity, %")
        lower.set(xlabel="bytes held, % of the full cache", ylabel="pass keys found, %", ylim=(-4, 104))
        upper.legend(fontsize=8, frameon=False)
    return save_figure(figure, folder / "cache")


def _line(axes: object, x: Sequence[float], changes: Sequence[Sequence[float]], number: int, label: str) -> None:
    middle = [each[0] for each in changes]
    reach = [[each[0] - each[1] for each in changes], [each[2] - each[0] for each in changes]]
    axes.errorbar(x, middle, yerr=reach, capsize=2, label=label, **line_style(number, mark=True))  # type: ignore[attr-defined]


def is_measurable(full: Way) -> bool:
    """Whether the full cache finds half of the keys; if not, what others find says nothing."""
    return sum(full.found) * 2 >= len(full.found)


def _found(way: Way) -> float:
    return 100 * sum(way.found) / len(way.found)
