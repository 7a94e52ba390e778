"""Tables of `bench short`, `bench step` and `bench load`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from bayesattn.report.tables import make_table

if TYPE_CHECKING:  # some of these modules import transformers
    from bayesattn.benchmarks.load import Beside, Trainings
    from bayesattn.benchmarks.short import Row
    from bayesattn.benchmarks.step import Generation, Step


def short_table(rows: Sequence[Row], phase: str) -> Table:
    """Shapes down: the time, as a multiple of plain SDPA's, and the share of the machine's GEMM rate."""
    rows = [row for row in rows if row.phase == phase]
    table = make_table(
        title=f"{phase}, prior and Scalable Softmax: time as a multiple of plain causal SDPA",
        caption="shape: batch x heads x tokens x head size; 8:2, two key heads; /4, four packed documents, which plain "
        "SDPA does not tell apart; GEMM: share of the rate of a large matrix product, visible pairs alone counted\n"
        f"largest error against the float64 reference in this run: {max(row.error for row in rows):.0e}",
        min_width=76,  # of the title
    )
    table.add_column("shape", no_wrap=True)
    for heading in ("plain SDPA", "bayesattn", "GEMM"):
        table.add_column(heading, justify="right")
    for row in rows:
        ours = row.note if row.seconds is None else f"{row.ratio:.2f}× {duration(row.seconds)}"
        share = "–" if row.gemm_share is None else f"{row.gemm_share:.0%}"
        table.add_row(row.shape, duration(row.plain_seconds), ours, share)
    return table


def step_table(rows: Sequence[Step]) -> Table:
    """Keys and mixes of heads down: the time of a token, as a multiple of the full cache's."""
    table = make_table(
        title="one token of one layer with Scalable Softmax: LayerCache.attend, and append + SDPA in a full cache",
        caption=f"largest error against the float64 reference in this run: {max(row.error for row in rows):.0e}",
    )
    for name in ("keys", "heads", "full cache", "bayesattn", "cache kept"):
        table.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    for row in rows:
        ours = "wrong, not timed" if row.seconds is None else f"{row.ratio:.2f}× {duration(row.seconds)}"
        kept = f"{row.bytes / row.full_bytes:.1%} of {row.full_bytes / 1e6:,.0f} MB"
        table.add_row(f"{row.tokens:,}", row.mix, duration(row.full_seconds), ours, kept)
    return table


def generation_table(rows: Sequence[Generation]) -> Table:
    """Models down: tokens a second of `generate`, next to a Llama of the same sizes with two caches."""
    table = make_table(
        title=f"generate, tokens a second: {rows[0].new_tokens:,} tokens after {rows[0].prompt:,}",
        caption="Llama: of the same sizes, random weights; ours: as a share of DynamicCache; without a cache, the "
        f"logit of a token is at most {max(row.gap for row in rows):.1g} below the largest",
    )
    table.add_column("model")
    for name in ("Llama\nDynamicCache", "\nStaticCache", "bayesattn"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ours = "wrong, not timed"
        if row.tokens_per_second is not None:
            ours = f"{row.tokens_per_second / row.dynamic_tokens_per_second:.2f}× {row.tokens_per_second:,.0f}"
        peers = (row.dynamic_tokens_per_second, row.static_tokens_per_second)
        table.add_row(row.model, *(f"{speed:,.0f}" for speed in peers), ours)
    return table


def beside_table(rows: Sequence[Beside], shape: str) -> Table:
    """Methods down: how much slower they are beside another process that trains."""
    table = make_table(
        title=f"forward + backward at {shape} beside another training: times the time alone",
        caption="medians and ranges of the tries; neighbour: speed of the other process, as a share of its speed alone",
    )
    for name in ("", "alone", "beside", "slow-down", "range", "slowest", "neighbour"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        if of_method[0].note:
            table.add_row(method, of_method[0].note)
            continue
        slow_downs = [row.slow_down or 0.0 for row in of_method]
        alone, beside, others = (
            statistics.median(getattr(row, field) for row in of_method) for field in ("alone", "beside", "neighbour")
        )
        table.add_row(
            method,
            duration(alone),
            duration(beside),
            f"{statistics.median(slow_downs):.1f}×",
            f"{min(slow_downs):.1f} … {max(slow_downs):.1f}",
            duration(max(row.longest or 0.0 for row in of_method)),
            f"{others:.0%}",
        )
    return table


def trainings_table(rows: Sequence[Trainings]) -> Table:
    """Models down: the speed of two trainings side by side, each as a share of its speed alone."""
    from bayesattn.benchmarks.load import spread

    table = make_table(
        title="two trainings side by side: the speed of each, as a share of its speed alone",
        caption="spread: the fastest training of any try over the slowest",
    )
    for name in ("", "steps/s alone", "share", "range", "spread"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        shares = [share for row in of_model for share in row.shares]
        speed = statistics.median(speed for row in of_model for speed in row.steps_per_second)
        table.add_row(
            model,
            f"{speed:.2f}",
            f"{statistics.median(shares):.2f}",
            f"{min(shares):.2f} … {max(shares):.2f}",
            f"{spread(rows, model):.1f}×",
        )
    return table


def duration(seconds: float) -> str:
    """Two to three digits and a unit: `26 µs`, `9.8 ms`."""
    value, unit = next(
        ((seconds * times, name) for times, name in ((1, "s"), (1e3, "ms")) if seconds * times >= 1),
        (seconds * 1e6, "µs"),
    )
    return f"{value:.{0 if value >= 10 else 1}f} {unit}"
