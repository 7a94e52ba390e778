"""Attention with a prior against its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from bayesattn.schemas import Amount, Row, Tokens, Whole
from bayesattn.studies.bench import runs
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase
from bayesattn.studies.options import parse_lengths
from bayesattn.studies.study import Progress, Study

BASELINE: dict[Phase, str] = {FORWARD: "plain SDPA, no prior", TRAINING: "dense autograd, scaled"}


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time attention with a learned prior against its peers.

    The peers are SDPA, with and without a bias matrix, FlexAttention and dense autograd. A method whose results differ
    from the float64 reference is not timed. It takes about ten minutes on two cores and saves the JSON file after every
    length.

    Example: bayesattn bench attention --lengths 512,2048 --no-flex --json bench.json
    """

    file: ClassVar[str] = "attention"
    title: ClassVar[str] = "bench-attention"
    pictures: ClassVar[tuple[str, ...]] = ("attention",)

    lengths: runs.Lengths = "512,1024,2048,4096,8192,16384"
    memory: runs.Memory = True
    flex: Annotated[bool, typer.Option(help="Include compiled FlexAttention, which takes long to compile.")] = True


@dataclass(frozen=True)
class Timing(Row):
    """One measurement; `ratio` is its seconds over those of the baseline, None if the baseline was not timed."""

    phase: Phase
    method: str
    tokens: Tokens
    seconds: Amount | None
    ratio: Amount | None
    peak_bytes: Whole | None
    error: Amount | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Timings(runs.Measured):
    """Every method at every length."""

    rows: list[Timing]


def run(settings: Settings, progress: Progress[Timings]) -> Timings:
    from bayesattn.studies.bench.attention import measure

    lengths = parse_lengths(settings.lengths, measure.most_tokens())
    sizes = measure.sizes(settings.seed)
    before = runs.stopped(progress, sizes)
    result = Timings(settings=sizes, rows=before.rows if before else [])
    whole = [row for row in result.rows if row.phase == TRAINING]  # a length ends with this phase
    done = [row for row in result.rows if row.tokens in {last.tokens for last in whole}]
    for rows in runs.by_length(
        progress,
        "measuring",
        lengths,
        done,
        lambda missing: measure.measure(missing, seed=settings.seed, memory=settings.memory, flex=settings.flex),
    ):
        result = Timings(settings=sizes, rows=rows)
        progress.keep(result)
    return result


STUDY = Study(kind="bench-attention", commands={"bench attention": Settings}, run=run, result=Timings, place=100)
