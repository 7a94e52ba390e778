"""Long contexts with pruned attention and the pruning cache: `bayesattn bench long`.

`python -m bayesattn.studies.bench.long.measure MIX TOKENS SEED` prints the peak memory of one pruned prefill; the MIX
`plain` is plain SDPA.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bayesattn as ba
from bayesattn.compute.device import device_memory
from bayesattn.studies.bench.attention import measure as attention
from bayesattn.studies.bench.attention.measure import HEADS, SIZE
from bayesattn.studies.bench.decoding import decode
from bayesattn.studies.bench.inputs import LARGEST_ERROR, SHARE_OF_MEMORY
from bayesattn.studies.bench.long.run import Decode, Exponent, Prefill
from bayesattn.studies.bench.measure import peak_bytes, peak_bytes_of, seconds_in_turn

TOLERANCE = 1e-6
# Queries over the whole sequence that are compared with the float64 reference.
CHECKED_QUERIES = 64
# Exponents of growth are fitted to lengths from this one on.
SHORTEST_FITTED = 16_384
# Memory per token of the inputs, the output and the working copies, rounded up.
BYTES_PER_TOKEN = 30_000

LOCAL, HALF, FLAT = "all local", "half retrieval", "all flat"
# In the place of a mix: SDPA without a prior.
PLAIN = "plain"


def mixes() -> dict[str, ba.Prior]:
    """Three layers: all heads local, half of them, none. Local heads have Laplace priors with scales of 4 to 20 tokens.
    In the other heads no key can be pruned."""
    scales = torch.logspace(math.log10(4), math.log10(20), HEADS).tolist()
    half = HEADS // 2
    return {
        LOCAL: ba.GeneralizedGaussian.from_shape([1.0] * HEADS, scales),
        HALF: ba.GeneralizedGaussian.from_shape([1.0] * half + [-0.5] * half, scales[::2] + [8.0] * half),
        FLAT: ba.Uniform(HEADS),
    }


def run_prefill(
    lengths: Sequence[int], *, seed: int = 0, memory: bool = True, longest: float = 120.0
) -> Iterator[list[Prefill]]:
    """Measure prefill; yields the rows of one length at a time, the shortest first.

    Skips a measurement if the one before predicts that it takes longer than `longest` seconds.
    """
    before: list[Prefill] = []
    for tokens in sorted(lengths):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
        work: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        notes: dict[str, str] = {}
        if _predicted(before, "dense_seconds", FLAT, tokens) <= longest:
            work["dense"] = lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True)  # type: ignore[misc]
        for mix, prior in mixes().items():
            seconds = _predicted(before, "pruned_seconds", mix, tokens)
            if seconds > longest:
                notes[mix] = "too long" if seconds == math.inf else f"would take about {seconds:,.0f} s"
                continue

            def attend(prior: ba.Prior = prior, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return ba.bayesian_attention(q, k, v, prior, tolerance=TOLERANCE)

            with torch.no_grad():
                errors[mix] = _error(attend(), q, k, v, prior)
            if errors[mix] > LARGEST_ERROR:
                notes[mix] = f"wrong by {errors[mix]:.1e}, not timed"
                continue
            work[mix] = attend
            work["plan " + mix] = lambda prior=prior, q=q, k=k, v=v: ba.attention_plan(
                q, k, v, prior, tolerance=TOLERANCE
            )  # type: ignore[misc]
        with torch.no_grad():
            seconds_of = seconds_in_turn(work)
        plain_bytes = peak_memory(PLAIN, tokens, seed) if memory and "dense" in seconds_of else None
        rows = []
        for mix, prior in mixes().items():
            timed = mix in seconds_of
            rows.append(
                Prefill(
                    mix,
                    tokens,
                    seconds_of.get("dense"),
                    seconds_of.get(mix),
                    seconds_of.get("plan " + mix),
                    float(ba.attention_plan(q, k, v, prior, tolerance=TOLERANCE).kept().mean()) if timed else None,
                    peak_memory(mix, tokens, seed) if memory and timed else None,
                    errors.get(mix),
                    notes.get(mix, ""),
                    plain_bytes,
                )
            )
        before = rows
        yield rows


def peak_memory(mix: str, tokens: int, seed: int = 0) -> int:
    """Bytes that a pruned prefill, or plain SDPA, needs above its inputs, measured in a process of its own."""
    return peak_bytes_of("bayesattn.studies.bench.long.measure", mix, str(tokens), str(seed))


def run_decode(lengths: Sequence[int], *, seed: int = 0) -> Iterator[list[Decode]]:
    """Measure decoding; yields the rows of one length at a time."""
    for tokens in sorted(lengths):
        yield [_decode(mix, prior, tokens, seed) for mix, prior in mixes().items()]


def exponents(rows: Sequence[Prefill]) -> list[Exponent]:
    """How time grows with length, for each mix of heads."""
    results = []
    for mix in mixes():
        fitted = [row for row in rows if row.mix == mix and row.tokens >= SHORTEST_FITTED]
        pruned = [(row.tokens, row.pruned_seconds) for row in fitted if row.pruned_seconds]
        dense = [(row.tokens, row.dense_seconds) for row in fitted if row.dense_seconds]
        results.append(Exponent(mix, _slope(pruned), _slope(dense), [tokens for tokens, _ in pruned]))
    return results


def sizes(seed: int) -> dict[str, object]:
    """Sizes, seed, software and hardware of the measurement."""
    return {**attention.sizes(seed), "tolerance": TOLERANCE}


def most_tokens() -> int:
    """The longest sequence that fits in this machine's memory."""
    return int(device_memory() * SHARE_OF_MEMORY / BYTES_PER_TOKEN)


def _predicted(before: Sequence[Prefill], field: str, mix: str, tokens: int) -> float:
    """Seconds if time grows with the square of the length; infinite if the length before was not timed."""
    for row in before:
        if row.mix == mix:
            seconds = getattr(row, field)
            return math.inf if seconds is None else seconds * (tokens / row.tokens) ** 2
    return 0.0


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    if len(points) < 2:
        return None
    x = torch.tensor([tokens for tokens, _ in points], dtype=torch.float64).log()
    y = torch.tensor([seconds for _, seconds in points], dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, prior: ba.Prior) -> float:
    """Largest relative error of some queries, the last one included, against the float64 reference."""
    tokens = q.shape[2]
    queries = torch.linspace(0, tokens - 1, min(CHECKED_QUERIES, tokens)).long().tolist()
    worst = 0.0
    for row in queries:
        keys = slice(0, row + 1)
        expected = ba.bayesian_attention(
            q[:, :, row : row + 1].double(), k[:, :, keys].double(), v[:, :, keys].double(), prior,
            implementation="reference",
        )  # fmt: skip
        worst = max(worst, float((out[:, :, row : row + 1].double() - expected).norm() / expected.norm()))
    return worst


def _decode(mix: str, prior: ba.Prior, tokens: int, seed: int) -> Decode:
    result = decode(prior, None, tokens, SIZE, TOLERANCE, seed)
    return Decode(
        mix,
        tokens,
        1 / result.full_seconds,
        None if result.seconds is None else 1 / result.seconds,
        result.full_bytes,
        result.bytes,
        result.error,
    )


def _print_peak(mix: str, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> None:
        with torch.no_grad():
            if mix == PLAIN:
                scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                ba.bayesian_attention(q, k, v, mixes()[mix], tolerance=TOLERANCE)

    attend(*torch.randn(3, 1, HEADS, 1024, SIZE))  # load everything that a first call loads
    q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
    print(json.dumps(peak_bytes(lambda: attend(q, k, v))))


if __name__ == "__main__":
    _print_peak(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
