"""Prefill and decoding as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bayesattn.drawing.figures import lines_by_length, make_figure, save_figure
from bayesattn.drawing.tables import duration, make_table, megabytes
from bayesattn.studies.bench.drawing import largest_error
from bayesattn.studies.bench.long.run import Decode, Exponent, Long, Prefill

PLAIN = "plain SDPA"


def tables(result: Long) -> list[Table | str]:
    tolerance = result.settings["tolerance"]
    parts: list[Table | str] = []
    if result.rows:
        parts.append(_prefill_table(result.rows, result.exponents, tolerance))
    return [*parts, _decode_table(result.decode, tolerance)] if result.decode else parts


def _prefill_table(rows: Sequence[Prefill], exponents: Sequence[Exponent], tolerance: float) -> Table:
    """Lengths down: plain SDPA, and each mix of heads with its speed-up, the share it computes and its memory."""
    grows = [exponent for exponent in exponents if exponent.pruned is not None]
    growth = "; ".join(f"{exponent.mix} n^{exponent.pruned:.2f}" for exponent in grows)
    caption = largest_error(rows)
    table = make_table(
        title=f"prefill, tolerance {tolerance:g}: speed-up over plain SDPA, time, share computed, memory",
        caption=f"{caption}\ngrowth from {min(grows[0].lengths, default=0):,} tokens on: {growth}"
        if growth
        else caption,
        columns=("tokens",),
    )
    table.add_column("plain SDPA\nno prior", justify="right")
    for mix in dict.fromkeys(row.mix for row in rows):
        table.add_column(mix.replace(", ", "\n"), justify="right")
    for length in sorted({row.tokens for row in rows}):
        at_length = [row for row in rows if row.tokens == length]
        table.add_row(f"{length:,}", _plain_field(rows, at_length[0]), *map(_prefill_field, at_length))
    return table


def _plain_field(rows: Sequence[Prefill], row: Prefill) -> str:
    """Time and memory of plain SDPA."""
    if not row.dense_seconds:
        return plain_estimate(rows, row)
    memory = "" if row.dense_peak_bytes is None else f"\n{megabytes(row.dense_peak_bytes)}"
    return f"{duration(row.dense_seconds)}{memory}"


def plain_estimate(rows: Sequence[Prefill], row: Prefill) -> str:
    """What plain SDPA would take at a length where it was not run, by the longest length where it was."""
    timed = [each for each in rows if each.dense_seconds and each.tokens < row.tokens]
    if not timed:
        return "too long"
    last = max(timed, key=lambda each: each.tokens)
    return f"would take about {(last.dense_seconds or 0) * (row.tokens / last.tokens) ** 2:,.0f} s"


def _prefill_field(row: Prefill) -> str:
    if row.pruned_seconds is None:
        return row.note
    faster = f"{row.dense_seconds / row.pruned_seconds:.1f}× " if row.dense_seconds and row.pruned_seconds else ""
    memory = "" if row.peak_bytes is None else f", {megabytes(row.peak_bytes)}"
    return f"{faster}{duration(row.pruned_seconds)}\n{row.kept or 0:.1%}{memory}"


def _decode_table(rows: Sequence[Decode], tolerance: float) -> Table:
    """Tokens per second and bytes of the cache, next to those of a full one."""
    table = make_table(
        title=f"decoding, tolerance {tolerance:g}: the pruning cache and a full one with plain SDPA",
        caption=largest_error(rows),
    )
    for name in ("tokens", "heads", "full cache\ntokens/s", "bayesattn\ntokens/s", "cache kept\nof MB"):
        table.add_column(name, justify="left" if name == "heads" else "right", no_wrap=True)
    for row in rows:
        ours = "wrong, not timed"
        if row.cache_tokens_per_second is not None:
            ratio = row.cache_tokens_per_second / row.full_tokens_per_second
            ours = f"{ratio:.1f}× {row.cache_tokens_per_second:,.0f}"
        kept = f"{row.cache_bytes / row.full_bytes:.1%} of {row.full_bytes / 1e6:,.0f}"
        table.add_row(f"{row.tokens:,}", row.mix, f"{row.full_tokens_per_second:,.0f}", ours, kept)
    return table


def figures(result: Long, folder: Path) -> list[Path]:
    """Seconds and memory of prefill, tokens per second of decoding and bytes of cache; all axes logarithmic."""
    mixes = list(dict.fromkeys([*(row.mix for row in result.rows), *(row.mix for row in result.decode)]))

    def prefill(value: str, unit: float = 1.0, of: Sequence[str] = mixes) -> dict[str, list[tuple[int, float | None]]]:
        return {
            mix: [(row.tokens, (getattr(row, value) or 0) / unit) for row in result.rows if row.mix == mix]
            for mix in of
        }

    def decode(value: str, unit: float = 1.0, of: Sequence[str] = mixes) -> dict[str, list[tuple[int, float | None]]]:
        return {
            mix: [(row.tokens, (getattr(row, value) or 0) / unit) for row in result.decode if row.mix == mix]
            for mix in of
        }

    first = mixes[:1]
    panels = [
        ("prefill", "seconds", prefill("dense_seconds", of=first), prefill("pruned_seconds")),
        (
            "memory of prefill",
            "MB above the inputs",
            prefill("dense_peak_bytes", 1e6, first),
            prefill("peak_bytes", 1e6),
        ),
        (
            "decoding",
            "tokens per second",
            decode("full_tokens_per_second", of=first),
            decode("cache_tokens_per_second"),
        ),
        ("cache of one layer", "MB", decode("full_bytes", 1e6, first), decode("cache_bytes", 1e6)),
    ]
    figure = make_figure(width=13, height=9)
    for index, (title, label, plain, ours) in enumerate(panels):
        lines = dict(zip([PLAIN] * len(plain), plain.values(), strict=True)) | ours
        numbers = [3] * len(plain) + list(range(len(mixes)))  # plain attention looks the same in all panels
        lines_by_length(figure.add_subplot(2, 2, index + 1), title, label, lines, numbers)
    return save_figure(figure, folder / "long")
