"""Tables of docs/fit.md in Markdown, by the marks between which they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bayesattn.drawing.tables import duration
from bayesattn.fit.fitting import choose
from bayesattn.studies.bench.step.run import Decoding, Steps
from bayesattn.studies.cache_shares.run import FITTED, FULL, CacheShares, Way
from bayesattn.studies.cache_shares.show import change_text, is_measurable
from bayesattn.studies.fit.run import Fitted
from tools.bench_tables import markdown

KEPT = (0.5, 0.3, 0.2, 0.1)
# The model in float32, of which some prompts are compared with those in bfloat16.
FLOAT32 = "smollm2"


def tables(results: Mapping[Path, Any]) -> dict[str, str]:
    """All tables for which there are results, by their file."""
    of = lambda kind: [result for result in results.values() if isinstance(result, kind)]  # noqa: E731
    fits, caches, steps = of(Fitted), of(CacheShares), of(Steps)
    kvpress = [result for result in results.values() if isinstance(result, dict)]
    made = {
        "fits": fitted(sorted(fits, key=lambda each: each.prices.length)),
        "decoding": decoding([row for each in steps for row in each.decoding or []]),
        "kvpress": compared(kvpress),
    }
    precise = [each for each in caches if each.model == FLOAT32]
    caches = [each for each in caches if each.model != FLOAT32]
    made["precision"] = precision([way for each in precise for way in each.ways], caches)
    made["cache"] = shares([way for each in caches for way in each.ways])
    return {mark: table for mark, table in made.items() if table}


def fitted(results: Sequence[Fitted]) -> str:
    """Lengths down: how long the measurement took, and the share of bytes held for each that is asked."""
    heads = ("tokens", "measured in", *(f"asked {keep:.0%}" for keep in KEPT), "rank correlation")
    rows = []
    for result in results:
        held = [f"{choose(result.prices, keep).share:.1%}" for keep in KEPT]
        stability = "" if result.stability is None else f"{result.stability:.2f}"
        rows.append([f"{result.prices.length:,}", duration(result.prices.seconds), *held, stability])
    return markdown(heads, rows)


def shares(ways: Sequence[Way]) -> str:
    """Ways to keep a cache down, by length."""
    heads = ("prompts", "cache", "MB", "bytes", "perplexity", "change in %", "KL", "keys")
    rows = []
    for length in sorted({way.length for way in ways}):
        at = [way for way in ways if way.length == length]
        full = next(way for way in at if way.method == FULL)
        for way in sorted(at, key=lambda each: (-(each.keep or 1.0), each.method)):
            keys = f"{sum(way.found)} of {len(way.found)}" if is_measurable(full) else ""
            if way is full:
                first, changed, kl = f"{len(full.losses)} × {length:,}", "", ""
                keys = keys or "not measurable"
            else:
                first, changed, kl = "", change_text(way.losses, full.losses), f"{np.mean(way.divergences):.3f}"
            size = [_megabytes(way.bytes), f"{way.bytes / full.bytes:.0%}"]
            rows.append([first, way.name, *size, f"{way.perplexity:.1f}", changed, kl, keys])
    return markdown(heads, rows, left=2)


def precision(ways: Sequence[Way], caches: Sequence[CacheShares]) -> str:
    """Divergences of fitted windows in float32 and in bfloat16, on the prompts that both have read."""
    others = {(way.length, way.keep): way for each in caches for way in each.ways
              if way.method == FITTED}  # fmt: skip
    heads = ("prompts", "bytes", "KL in float32", "KL in bfloat16")
    rows = []
    for way in ways:
        if way.method == FITTED and way.keep is not None and (way.length, way.keep) in others:
            number = len(way.divergences)
            other = others[way.length, way.keep].divergences[:number]
            means = (f"{np.mean(each):.3f}" for each in (way.divergences, other))
            rows.append([f"{number} × {way.length:,}", f"{way.keep:.0%}", *means])
    return markdown(heads, rows)


def compared(results: Sequence[Mapping[str, Any]]) -> str:
    """Methods of kvpress and fitted windows, by length and share: rows of tools/kvpress_shares.py."""
    heads = ("prompt", "asked", "method", "MB after the prompt", "MB at the end", "KL", "change in %", "keys")
    rows = []
    for row in (row for result in results for row in result["rows"]):
        found = f"{sum(row['found'])} of {len(row['found'])}"
        sizes = [_megabytes(row["bytes"]), _megabytes(row["end_bytes"])]
        if row["keep"] is None:
            full = row
            rows.append([f"{row['length']:,}", "", row["method"], *sizes, "", "", found])
        else:
            changed = change_text(row["losses"], full["losses"])
            kl = f"{np.mean(row['divergences']):.3f}"
            rows.append(["", f"{row['keep']:.0%}", row["method"], *sizes, kl, changed, found])
    return markdown(heads, rows, left=3)


def decoding(rows: Sequence[Decoding]) -> str:
    """Prompts down: tokens a second."""
    heads = ("prompt", "cache kept", "DynamicCache", "StaticCache", "windows", "of the faster")
    return markdown(heads, [
        [f"{row.prompt:,}", f"{row.bytes / row.full_bytes:.1%}", f"{row.dynamic_tokens_per_second:.1f}",
         f"{row.static_tokens_per_second:.1f}",
         "wrong" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
         "" if row.ratio is None else f"**{row.ratio:.2f}×**"]
        for row in rows
    ])  # fmt: skip


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f}"
