"""Both phases under every prior, and Inkling's attention, as tables."""

from __future__ import annotations

from rich.table import Table

from bayesattn.drawing.tables import duration, make_table, megabytes
from bayesattn.studies.bench.conditioned.run import BASELINE, Conditioned, Peer, Timing
from bayesattn.studies.bench.drawing import largest_error
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase


def tables(result: Conditioned) -> list[Table | str]:
    parts: list[Table | str] = []
    for phase in (FORWARD, TRAINING):
        if rows := [row for row in result.rows if row.phase == phase]:
            parts.append(_table(rows, phase))
    return [*parts, _inkling_table(result.inkling)] if result.inkling else parts


def _table(rows: list[Timing], phase: Phase) -> Table:
    """Priors down: time as a multiple of the baseline's, and peak memory above the inputs."""
    table = make_table(
        title=f"{phase}: time as a multiple of {BASELINE[phase]}",
        caption=largest_error(rows),
        min_width=66,  # of the title and the caption
        columns=("tokens",),
    )
    table.add_column("prior", no_wrap=True)
    for heading in ("baseline", "bayesattn", "memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        timed = row.seconds is not None
        table.add_row(
            f"{row.tokens:,}",
            row.prior,
            row.note if timed and row.baseline_seconds is None else _seconds(row.baseline_seconds),
            _multiple(row.ratio, row.seconds) if timed else row.note,
            _bytes(row.peak_bytes),
        )
    return table


def _inkling_table(rows: list[Peer]) -> Table:
    """Layers down: time and memory of the layer as it is, and with our attention."""
    errors = [row.error for row in rows if row.error is not None]
    table = make_table(
        title="one layer of Inkling, forward: as in transformers, and with bayesattn",
        caption=f"largest difference of the outputs in this run: {max(errors):.0e}" if errors else None,
        min_width=66,
        columns=("tokens",),
    )
    table.add_column("layer", no_wrap=True)
    for heading in ("transformers", "bayesattn", "memory,\ntransformers", "memory,\nbayesattn"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row.peak_bytes / row.peer_peak_bytes if row.peak_bytes and row.peer_peak_bytes else None
        ratio = row.seconds / row.peer_seconds if row.seconds and row.peer_seconds else None
        table.add_row(
            f"{row.tokens:,}",
            row.layer,
            _seconds(row.peer_seconds),
            _multiple(ratio, row.seconds) if row.seconds is not None else row.note,
            _bytes(row.peer_peak_bytes),
            _bytes(row.peak_bytes) if share is None else f"{share:.1%} {_bytes(row.peak_bytes)}",
        )
    return table


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def _multiple(ratio: float | None, seconds: float | None) -> str:
    return _seconds(seconds) if ratio is None else f"{ratio:.2f}× {_seconds(seconds)}"


def _bytes(number: int | None) -> str:
    return "–" if number is None else megabytes(number)
