"""The first two minutes with bayesattn: see the priors, see that attention with them is exact and fast."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import bayesattn as ba
from bayesattn.benchmarks.attention import FORWARD, TRAINING, Row, run
from bayesattn.report import plots, tables

TOKENS = 1024
BENCH_TOKENS = 2048


def example_priors() -> dict[str, ba.Prior]:
    """One of each family, few heads each."""
    return {
        "NoPE": ba.Uniform(1),
        "ALiBi": ba.Laplace(4),
        "BAM": ba.GeneralizedGaussian(5, "spread"),
        "KERPLE": ba.KerpleLog(3),
        "Window": ba.Window(3, [16, 64, 256]),
    }


def demo(out: Path, console: Console) -> None:
    """Print both tables and write the gallery to `out`."""
    priors = example_priors()
    console.print(tables.prior_table(priors, TOKENS))
    window = ba.Window(5, 256) * ba.GeneralizedGaussian(5, "spread")
    picture, _ = plots.gallery({**priors, "Window × BAM": window}, TOKENS, out / "priors")

    console.print()
    rows: list[Row] = []
    with console.status(f"attention over {BENCH_TOKENS:,} tokens, exactness and speed"):
        for part in run([BENCH_TOKENS], memory=False, flex=False):
            rows += part
    for phase in (FORWARD, TRAINING):
        console.print(tables.attention_table(rows, phase))
    console.print(
        "Errors are against the float64 reference, in this run; 8 heads × 64, float32. "
        f"“scaled” is with Scalable Softmax and its gradients.\n\nThe priors as a picture: {picture}\n"
        "Next: `bayesattn bench attention` for longer sequences, memory and FlexAttention; "
        "docs/extending.md for a prior of your own."
    )
