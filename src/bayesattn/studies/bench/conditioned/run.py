"""Attention with priors that depend on the query against its peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer

from bayesattn.schemas import Amount, Row, Tokens, Whole
from bayesattn.studies.bench import runs
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase
from bayesattn.studies.options import finite, parse_lengths
from bayesattn.studies.study import Progress, Study

BASELINE: dict[Phase, str] = {FORWARD: "plain SDPA, no prior", TRAINING: "dense autograd of the same formula"}


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time priors that depend on the query, and sinks.

    The peers are plain SDPA, dense autograd of the same formula, and a layer of Inkling in transformers. Results that
    differ from the float64 reference are not timed. It takes about ten minutes on two cores and saves the JSON file
    after every length.

    Example: bayesattn bench conditioned --lengths 1024 --training 512 --no-inkling --json conditioned.json
    """

    file: ClassVar[str] = "conditioned"
    title: ClassVar[str] = "bench-conditioned"

    lengths: Annotated[
        str, typer.Option(metavar="N,N,…", help="Lengths of the forward pass, and of Inkling's attention.")
    ] = "8192"
    training: Annotated[str, typer.Option(metavar="N,N,…", help="Lengths of forward and backward.")] = "4096,16384"
    longest: Annotated[
        float,
        typer.Option(
            min=0.1, max=1e6, callback=finite, help="Skip a measurement that would take more seconds than this."
        ),
    ] = 120.0
    memory: runs.Memory = True
    inkling: Annotated[
        bool, typer.Option(help="Compare with InklingAttention of transformers, with random weights.")
    ] = True


@dataclass(frozen=True)
class Timing(Row):
    """One phase under one prior.

    Args:
        baseline_seconds: time of plain causal SDPA for the forward pass; of autograd through the reference for forward
            and backward. None if it would not fit into memory or take too long.
        ratio: seconds over those of the baseline.
        peak_bytes: memory above the inputs.
        error: largest relative error against the float64 reference.
        note: what was not measured, and why.
    """

    phase: Phase
    prior: str
    tokens: Tokens
    seconds: Amount | None
    baseline_seconds: Amount | None
    ratio: Amount | None
    peak_bytes: Whole | None
    error: Amount | None
    note: str = ""


@dataclass(frozen=True)
class Peer(Row):
    """A forward pass of one layer of Inkling as transformers computes it, and with our attention.

    Args:
        layer: full or sliding.
        error: relative difference of the two outputs.
        note: why it was not measured.
    """

    layer: str
    tokens: Tokens
    seconds: Amount | None
    peer_seconds: Amount | None
    peak_bytes: Whole | None
    peer_peak_bytes: Whole | None
    error: Amount | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Conditioned(runs.Measured):
    """Every prior at every length, and both kinds of layers of Inkling."""

    rows: list[Timing]
    inkling: list[Peer]


def run(settings: Settings, progress: Progress[Conditioned]) -> Conditioned:
    from bayesattn.studies.bench.conditioned import measure

    most = measure.most_tokens()
    lengths = parse_lengths(settings.lengths, most)
    parts = [(FORWARD, tokens) for tokens in lengths]
    parts += [(TRAINING, tokens) for tokens in parse_lengths(settings.training, most, "--training")]
    sizes, seed, memory = measure.sizes(settings.seed), settings.seed, settings.memory
    result = runs.stopped(progress, sizes) or Conditioned(settings=sizes, rows=[], inkling=[])
    done = result.rows
    for rows in runs.by_part(
        progress,
        "measuring",
        parts,
        done,
        lambda row: (row.phase, row.tokens),
        lambda missing: measure.measure(missing, done, seed=seed, memory=memory, longest=settings.longest),
    ):
        result = replace(result, rows=rows)
        progress.keep(result)
    if settings.inkling:
        from bayesattn.studies.bench.conditioned import inkling

        for peers in runs.by_length(
            progress,
            "Inkling's attention",
            lengths,
            result.inkling,
            lambda missing: (inkling.measure(tokens, seed=seed, memory=memory) for tokens in missing),
        ):
            result = replace(result, inkling=peers)
            progress.keep(result)
    return result


STUDY = Study(
    kind="bench-conditioned", commands={"bench conditioned": Settings}, run=run, result=Conditioned, place=105
)
