"""Tables of benchmarks in Markdown, by the marks between which docs/results.md has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bayesattn.drawing.tables import duration, megabytes
from bayesattn.studies.bench.attention.run import Timing as Method
from bayesattn.studies.bench.attention.run import Timings
from bayesattn.studies.bench.conditioned.run import Conditioned, Peer, Timing
from bayesattn.studies.bench.long.run import Decode, Long, Prefill
from bayesattn.studies.bench.long.show import plain_estimate
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase
from bayesattn.studies.bench.step.run import Generation, Step, Steps

ABSENT = "–"


def conditioned(result: Conditioned) -> dict[str, str]:
    """Both phases under every prior, and the layers of Inkling."""
    forward = [row for row in result.rows if row.phase == FORWARD]
    training = [row for row in result.rows if row.phase == TRAINING]
    return {
        "conditioned forward": markdown(
            ("tokens", "prior", "plain SDPA", "bayesattn", "memory"), map(_timing, forward), left=2
        ),
        "conditioned training": markdown(
            ("tokens", "prior", "dense autograd", "bayesattn", "memory"), map(_timing, training), left=2
        ),
        "conditioned inkling": markdown(
            ("tokens", "layer", "transformers", "bayesattn", "memory, transformers", "memory, bayesattn"),
            map(_peer, result.inkling), left=2,
        ),
    }  # fmt: skip


def attention(result: Timings) -> dict[str, str]:
    """Time and memory of every method at every length, in both phases."""
    tables = {}
    phases: list[tuple[str, Phase]] = [("forward", FORWARD), ("training", TRAINING)]
    for name, phase in phases:
        rows = [row for row in result.rows if row.phase == phase]
        tables[f"attention {name}"] = _by_method(rows, [_method_time(row) for row in rows])
        tables[f"attention {name} memory"] = _by_method(rows, [_method_memory(row) for row in rows])
    return tables


def long(result: Long) -> dict[str, str]:
    """Time and memory of prefill by mix of heads, and decoding."""
    mixes = list(dict.fromkeys(row.mix for row in result.rows))
    by_length = [
        [row for row in result.rows if row.tokens == length] for length in sorted({row.tokens for row in result.rows})
    ]
    heads = ("tokens", "plain SDPA, no prior", *mixes)
    times = [
        [f"{rows[0].tokens:,}", _plain_time(result.rows, rows[0]), *map(_prefill_time, rows)] for rows in by_length
    ]
    memory = [
        [f"{rows[0].tokens:,}", _megabytes(rows[0].dense_peak_bytes), *(_megabytes(row.peak_bytes) for row in rows)]
        for rows in by_length
    ]
    decoding = ("tokens before", "heads", "full cache, plain SDPA", "bayesattn", "cache kept")
    return {
        "long prefill": markdown(heads, times),
        "long memory": markdown(heads, memory),
        "long decoding": markdown(decoding, map(_decode, result.decode), left=2),
    }


def step(result: Steps) -> dict[str, str]:
    """One token of one layer, and `generate` of whole models."""
    return {
        "step tokens": step_tokens(result),
        "step generate": markdown(
            ("model", "Llama, DynamicCache", "Llama, StaticCache", "bayesattn"),
            map(_generation, result.generate),
            left=1,
        ),
    }


def step_tokens(result: Steps) -> str:
    """One token of one layer, by the number of keys and the heads."""
    return markdown(
        ("keys", "heads", "full cache, plain SDPA", "bayesattn", "cache kept"), map(_step, result.steps), left=2
    )


def _step(row: Step) -> list[str]:
    ours = "wrong, not timed" if row.seconds is None else _multiple(row.seconds, row.full_seconds)
    return [f"{row.tokens:,}", row.mix, duration(row.full_seconds), ours, f"{row.bytes / row.full_bytes:.1%}"]


def _generation(row: Generation) -> list[str]:
    ours = "wrong, not timed"
    if row.tokens_per_second is not None:
        ratio = row.tokens_per_second / row.dynamic_tokens_per_second
        ours = f"**{ratio:.2f}×** {row.tokens_per_second:.0f}"
    return [row.model, f"{row.dynamic_tokens_per_second:.0f}", f"{row.static_tokens_per_second:.0f}", ours]


def _by_method(rows: Sequence[Method], fields: Sequence[str]) -> str:
    """Lengths down, methods across."""
    methods = list(dict.fromkeys(row.method for row in rows))
    by_place = {(row.tokens, row.method): field for row, field in zip(rows, fields, strict=True)}
    lengths = sorted({row.tokens for row in rows})
    return markdown(
        ("tokens", *methods),
        ([f"{length:,}", *(by_place.get((length, method), ABSENT) for method in methods)] for length in lengths),
    )


def _method_time(row: Method) -> str:
    if row.seconds is None:
        return row.note
    return duration(row.seconds) if row.ratio is None else f"**{row.ratio:.2f}×** {duration(row.seconds)}"


def _method_memory(row: Method) -> str:
    return (row.note or ABSENT) if row.peak_bytes is None else megabytes(row.peak_bytes)


def _plain_time(rows: Sequence[Prefill], row: Prefill) -> str:
    return duration(row.dense_seconds) if row.dense_seconds else plain_estimate(rows, row)


def _prefill_time(row: Prefill) -> str:
    if row.pruned_seconds is None:
        return row.note
    faster = f"**{row.dense_seconds / row.pruned_seconds:.1f}×** " if row.dense_seconds else ""
    return f"{faster}{duration(row.pruned_seconds)}, {row.kept or 0:.1%}"


def _decode(row: Decode) -> list[str]:
    ours = "wrong, not timed"
    if row.cache_tokens_per_second is not None:
        ratio = row.cache_tokens_per_second / row.full_tokens_per_second
        ours = f"**{ratio:.1f}×** {row.cache_tokens_per_second:,.0f} tokens/s"
    kept = f"{row.cache_bytes / 1e6:.1f} of {row.full_bytes / 1e6:.1f} MB, {row.cache_bytes / row.full_bytes:.1%}"
    return [f"{row.tokens:,}", row.mix, f"{row.full_tokens_per_second:,.0f} tokens/s", ours, kept]


def _timing(row: Timing) -> list[str]:
    timed = row.seconds is not None
    baseline = row.note if timed and row.baseline_seconds is None else _seconds(row.baseline_seconds)
    time = _multiple(row.seconds, row.baseline_seconds) if timed else row.note
    return [f"{row.tokens:,}", row.prior, baseline, time, _megabytes(row.peak_bytes)]


def _peer(row: Peer) -> list[str]:
    time = _multiple(row.seconds, row.peer_seconds) if row.seconds is not None else row.note
    memory = _megabytes(row.peak_bytes)
    if row.peak_bytes and row.peer_peak_bytes:
        memory = f"**{row.peak_bytes / row.peer_peak_bytes:.1%}** {memory}"
    return [f"{row.tokens:,}", row.layer, _seconds(row.peer_seconds), time, _megabytes(row.peer_peak_bytes), memory]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> str:
    """A table in Markdown whose column `left` has words and the others numbers; nothing without rows."""
    rows = list(rows)
    if not rows:
        return ""
    line = "|".join("---" if number == left else "---:" for number in range(1, len(heads) + 1))
    return "\n".join([f"| {' | '.join(heads)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _multiple(seconds: float | None, baseline: float | None) -> str:
    return f"**{seconds / baseline:.2f}×** {duration(seconds)}" if seconds and baseline else _seconds(seconds)


def _seconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else duration(seconds)


def _megabytes(number: int | None) -> str:
    return ABSENT if number is None else megabytes(number)
