"""Long contexts with pruned attention and the pruning cache, for layers of local and other heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer

from bayesattn.schemas import Amount, Anything, Number, Row, Share, Tokens, Whole, number, record
from bayesattn.studies.bench import runs
from bayesattn.studies.options import finite, parse_lengths
from bayesattn.studies.study import Progress, Study


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time pruned attention and the pruning cache on long contexts.

    The peers are plain attention and a full cache; layers have local, retrieval or flat heads. Results that differ from
    the float64 reference are not timed. It takes about twenty minutes on two cores and saves the JSON file after every
    length.

    Example: bayesattn bench long --lengths 1024,16384 --decode 1024 --json long.json
    """

    file: ClassVar[str] = "long"
    title: ClassVar[str] = "bench-long"
    pictures: ClassVar[tuple[str, ...]] = ("long",)

    lengths: Annotated[str, typer.Option(metavar="N,N,…", help="Lengths of the prefill.")] = (
        "1024,4096,16384,65536,131072,262144"
    )
    decode: Annotated[str, typer.Option(metavar="N,N,…", help="Lengths of the context to decode after.")] = (
        "1024,16384,65536"
    )
    longest: Annotated[
        float,
        typer.Option(
            min=0.1, max=1e6, callback=finite, help="Skip a measurement that would take more seconds than this."
        ),
    ] = 120.0
    memory: runs.Memory = True


@dataclass(frozen=True)
class Prefill(Row):
    """Attention over a whole sequence.

    Args:
        dense_seconds: time of plain causal SDPA without a prior; None if it would take too long.
        pruned_seconds: time of pruned attention; `plan_seconds` of it for the plan.
        kept: share of the key blocks that are computed.
        note: why there is no time.
        dense_peak_bytes: memory of plain SDPA above the inputs.
    """

    mix: str
    tokens: Tokens
    dense_seconds: Amount | None
    pruned_seconds: Amount | None
    plan_seconds: Amount | None
    kept: Share | None
    peak_bytes: Whole | None
    error: Amount | None
    note: str = ""
    dense_peak_bytes: Whole | None = None


@dataclass(frozen=True)
class Decode(Row):
    """Decoding one token at a time; `full` stands for plain SDPA without a prior over all keys and values."""

    mix: str
    tokens: Tokens
    full_tokens_per_second: runs.Positive
    cache_tokens_per_second: Amount | None
    full_bytes: Tokens
    cache_bytes: Whole
    error: Amount


@dataclass(frozen=True)
class Exponent(Row):
    """The power of the number of tokens with which seconds grow, by least squares in log-log over `lengths`."""

    mix: str
    pruned: Number | None
    dense: Number | None
    lengths: list[Tokens]


@dataclass(frozen=True, kw_only=True)
class Long(runs.Measured):
    """Prefill (with the growth of its time) and decoding, by mix of heads and length."""

    settings: Annotated[dict[str, Anything], record({"tolerance": number(0)})]
    rows: list[Prefill]
    exponents: list[Exponent]
    decode: list[Decode]


def run(settings: Settings, progress: Progress[Long]) -> Long:
    from bayesattn.studies.bench.long import measure

    most = measure.most_tokens()
    lengths, decode_lengths = parse_lengths(settings.lengths, most), parse_lengths(settings.decode, most, "--decode")
    sizes, seed = measure.sizes(settings.seed), settings.seed
    result = runs.stopped(progress, sizes) or Long(settings=sizes, rows=[], exponents=[], decode=[])
    for decoded in runs.by_length(
        progress, "decoding", decode_lengths, result.decode, lambda missing: measure.run_decode(missing, seed=seed)
    ):
        result = replace(result, decode=decoded)
        progress.keep(result)
    for rows in runs.by_length(
        progress,
        "prefill",
        lengths,
        result.rows,
        lambda missing: measure.run_prefill(missing, seed=seed, memory=settings.memory, longest=settings.longest),
    ):
        result = replace(result, rows=rows, exponents=measure.exponents(rows))
        progress.keep(result)
    return result


STUDY = Study(kind="bench-long", commands={"bench long": Settings}, run=run, result=Long, place=101)
