"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from bayesattn.benchmarks.attention import BASELINE, Row
from bayesattn.priors import Prior


def prior_table(priors: Mapping[str, Prior], n: int) -> Table:
    """Every head of every prior: what it is for and how far it looks."""
    table = Table(
        title=f"What each head believes about distance, over {n:,} tokens",
        caption="span: the distance within which 99.9% of the prior lies; effective: tokens it counts on, 1/Σp²",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("prior", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("parameters")
    table.add_column("span", justify="right", no_wrap=True)
    table.add_column("effective", justify="right", no_wrap=True)
    for name, prior in priors.items():
        for summary in prior.describe(n):
            table.add_row(
                name if summary.head == 0 else "",
                str(summary.head),
                summary.kind,
                summary.parameters_text(),
                f"{summary.span:,}",
                f"{summary.effective_tokens:,.1f}",
            )
        table.add_section()
    return table


def attention_table(rows: Sequence[Row], phase: str) -> Table:
    """Lengths down, methods across: the ratio to the baseline's time, the time, and peak memory where measured."""
    rows = [row for row in rows if row.phase == phase]
    errors = [row.error for row in rows if row.error is not None]
    table = Table(
        title=f"{phase}: time as a multiple of {BASELINE[phase]}",
        caption=f"largest error against the float64 reference in this run: {max(errors):.0e}" if errors else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=66,  # of the title and the caption
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for method in dict.fromkeys(row.method for row in rows):
        table.add_column(method.replace(", ", "\n").replace(" with ", "\nwith "), justify="right")
    for length in sorted({row.tokens for row in rows}):
        table.add_row(f"{length:,}", *(_cell(row) for row in rows if row.tokens == length))
    return table


def _cell(row: Row) -> str:
    if row.seconds is None:
        return row.note
    seconds = f"{row.seconds * 1e3:.0f} ms" if row.seconds < 1 else f"{row.seconds:.1f} s"
    time = f"{row.ratio:.2f}× {seconds}" if row.ratio is not None else seconds
    return time if row.peak_bytes is None else f"{time}\n{row.peak_bytes / 1e6:,.0f} MB"
