"""Attention with priors that depend on the query: `bayesattn bench conditioned`.

`python -m bayesattn.studies.bench.conditioned.measure PRIOR PHASE TOKENS SEED` prints the peak memory under one prior;
PRIOR is its place in `PRIORS`, PHASE is 0 for the forward pass, 1 for forward and backward, and 2 for these of dense
autograd.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.compute.device import device_memory
from bayesattn.studies.bench.attention import measure as attention
from bayesattn.studies.bench.attention.measure import HEADS, SIZE
from bayesattn.studies.bench.conditioned.cases import PRIORS, Case, Error
from bayesattn.studies.bench.conditioned.run import Timing
from bayesattn.studies.bench.inputs import CHECKED_QUERIES, SHARE_OF_MEMORY
from bayesattn.studies.bench.measure import bytes_needed, peak_bytes, peak_bytes_of, seconds_in_turn
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase

Part = tuple[Phase, int]
PHASES: tuple[Phase, ...] = (FORWARD, TRAINING)
# In the place of a phase: training by dense autograd.
DENSE = 2


def sizes(seed: int) -> dict[str, object]:
    """Sizes, seed, software and hardware of the measurement."""
    return attention.sizes(seed)


def most_tokens() -> int:
    """The longest sequence that attention under every prior can train on in this machine's memory."""
    return attention.most_tokens()


def measure(
    parts: Sequence[Part],
    before: Sequence[Timing] = (),
    *,
    seed: int = 0,
    memory: bool = True,
    longest: float = math.inf,
    priors: Sequence[str] | None = None,
) -> Iterator[list[Timing]]:
    """Measure all priors, or some; yields the rows of one phase and length at a time.

    Skips a measurement if a shorter one predicts that it takes longer than `longest` seconds.
    """
    rows, priors = list(before), [*PRIORS] if priors is None else priors
    for phase, tokens in parts:
        notes = {name: _too_long(rows, phase, name, tokens, longest) for name in priors}
        timed = [name for name in priors if not notes[name]]
        part = _forward(timed, tokens, seed) if phase == FORWARD else _training(timed, tokens, seed, memory)
        part += [
            Timing(phase, name, tokens, None, None, None, None, None, note) for name, note in notes.items() if note
        ]
        if memory:
            part = [
                row if row.seconds is None else replace(row, peak_bytes=peak_memory(row.prior, phase, tokens, seed))
                for row in part
            ]
        rows += part
        yield part


def _forward(priors: Sequence[str], tokens: int, seed: int) -> list[Timing]:
    """All priors and plain SDPA in turn."""
    cases = {name: Case.make(name, tokens, seed) for name in priors}
    errors = {name: case.error(gradients=False) for name, case in cases.items()}
    q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
    work: dict[str, Callable[[], object]] = {"plain": lambda: scaled_dot_product_attention(q, k, v, is_causal=True)}
    work |= {name: case.attend for name, case in cases.items() if not errors[name].is_too_large}
    with torch.no_grad():
        seconds = seconds_in_turn(work)
    return [_timing(FORWARD, name, tokens, seconds.get(name), seconds["plain"], errors[name]) for name in priors]


def _training(priors: Sequence[str], tokens: int, seed: int, memory: bool) -> list[Timing]:
    """Each prior and dense autograd of its formula in turn."""
    return [_train(name, tokens, seed, memory) for name in priors]


def _train(name: str, tokens: int, seed: int, memory: bool) -> Timing:
    case = Case.make(name, tokens, seed)
    error = case.error(gradients=True)
    work = {"ours": case.training()} if not error.is_too_large else {}
    room = device_memory() * SHARE_OF_MEMORY
    needed = bytes_needed(
        PRIORS[name].matrices * HEADS * tokens**2 * 4,
        room,
        tokens,
        (lambda fewer: _peak(name, DENSE, fewer, seed)) if memory else None,
    )
    if fits := needed <= room:
        work["dense"] = case.training("reference")
    seconds = seconds_in_turn(work)
    row = _timing(TRAINING, name, tokens, seconds.get("ours"), seconds.get("dense"), error)
    return row if fits or row.seconds is None else replace(row, note=f"needs {needed / 1e9:.0f} GB")


def _timing(
    phase: Phase, name: str, tokens: int, seconds: float | None, baseline: float | None, error: Error
) -> Timing:
    ratio = None if seconds is None or baseline is None else seconds / baseline
    note = f"wrong by {error.value:.1e}, not timed" if seconds is None else ""
    return Timing(phase, name, tokens, seconds, baseline, ratio, None, error.value, note)


def _too_long(rows: Sequence[Timing], phase: Phase, name: str, tokens: int, longest: float) -> str:
    """What to say of a measurement that would take too long, if time grows with the square of the length."""
    shorter = [row for row in rows if (row.phase, row.prior) == (phase, name) and row.tokens < tokens]
    if not shorter:
        return ""
    last = max(shorter, key=lambda row: row.tokens)
    if last.seconds is None:
        return "too long" if "would take" in last.note else ""
    predicted = last.seconds * (tokens / last.tokens) ** 2
    return f"would take about {predicted:,.0f} s" if predicted > longest else ""


def peak_memory(name: str, phase: Phase, tokens: int, seed: int = 0) -> int:
    """Bytes that attention under a prior needs above its inputs, measured in a process of its own."""
    return _peak(name, PHASES.index(phase), tokens, seed)


def _peak(name: str, work: int, tokens: int, seed: int) -> int:
    arguments = ([*PRIORS].index(name), work, tokens, seed)
    return peak_bytes_of("bayesattn.studies.bench.conditioned.measure", *map(str, arguments))


def _print_peak(prior: int, phase: int, tokens: int, seed: int) -> None:
    name = [*PRIORS][prior]

    def work(tokens: int) -> Callable[[], object]:
        case = Case.make(name, tokens, seed)
        if phase == DENSE:
            return case.training("reference")
        return torch.no_grad()(case.attend) if PHASES[phase] == FORWARD else case.training()

    work(CHECKED_QUERIES)()  # load everything that a first call loads
    print(json.dumps(peak_bytes(work(tokens))))


if __name__ == "__main__":
    _print_peak(*(int(argument) for argument in sys.argv[1:]))
