"""What a share of the cache costs with the methods of kvpress and with fitted windows, on the same prompts.

kvpress pins another version of transformers than ours, so it needs an environment of its own, or
`pip install --no-deps kvpress` beside this package:

    python tools/kvpress_shares.py MODEL FIT.json… --keep 50%,25% --prompts 10 --json docs/data/kvpress.json

The lengths are those of the fits, and prompts, seeds and scores those of `bayesattn eval cache --prefill full`. Every
method reads the prompt with full attention and compresses it afterwards.

Caches of kvpress keep the share of the prompt and then all tokens that follow it. Heads with windows do not grow. So
fitted windows are measured twice: with as many bytes as kvpress has after the prompt, and with as many as it has on
average while the following tokens are scored, which is in favour of neither.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import kvpress
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.files import read_json, to_json, write_whole
from bayesattn.fit.allotment import ALL, positions_held
from bayesattn.fit.fitting import choose
from bayesattn.fit.price_files import Prices, load_prices
from bayesattn.studies.cache_shares.measure import Kind, Trial, bytes_of, cut, make_trial, model_with
from bayesattn.studies.cache_shares.run import FITTED
from bayesattn.studies.cache_shares.show import change_text
from bayesattn.studies.fit.run import parse_share

FULL, WINDOWS, ON_AVERAGE = "full cache", "fitted windows", "fitted windows, average bytes"
PRESSES: dict[str, Callable[[float], Any]] = {
    "SnapKV": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio),
    "ExpectedAttention": lambda ratio: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
    "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
    "TOVA": lambda ratio: kvpress.TOVAPress(compression_ratio=ratio),
    "KeyDiff": lambda ratio: kvpress.KeyDiffPress(compression_ratio=ratio),
    "Knorm": lambda ratio: kvpress.KnormPress(compression_ratio=ratio),
}


@torch.no_grad()
def read(model: Any, trial: Trial, press: Any = None) -> tuple[DynamicCache, Tensor]:
    """The cache after the prompt, and logits `[1, V]` of the next token; None is no press."""
    cache, positions = DynamicCache(), torch.arange(len(trial.prompt))
    settings = {"past_key_values": cache, "position_ids": positions[None], "cache_position": positions}
    ids = trial.prompt[None]
    if press is None:
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **settings).logits
    else:
        with press(model):
            logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **settings).logits
    return cache, logits[0, -1:]


@torch.no_grad()
def score(model: Any, trial: Trial, cache: Any, last: Tensor) -> dict[str, Any]:
    """Bytes after the prompt and at the end, logits of the tokens that follow, and whether the key is found."""
    length, size = len(trial.prompt), bytes_of(cache)

    def after(ids: Tensor, past: Any) -> Tensor:
        positions = torch.arange(length, length + len(ids))[None]
        logits: Tensor = model(input_ids=ids[None], past_key_values=past, position_ids=positions).logits[0]
        return logits

    asked = after(torch.cat([trial.question, trial.answer[:-1]]), copy.deepcopy(cache))
    found = bool((asked[-len(trial.answer) :].argmax(-1) == trial.answer).all())
    logits = torch.cat([last, after(trial.following[:-1], cache)]).float()
    return {"bytes": size, "end_bytes": bytes_of(cache), "logits": logits, "found": found}


def measure(
    reader: Reader, prices: Prices, trial: Trial, shares: list[float], presses: list[str]
) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Each method with each share, on one prompt: the full cache first."""
    model = reader.model
    full, last = read(model, trial)
    yield FULL, None, score(model, trial, copy.deepcopy(full), last)
    for share in shares:
        for name, kept in ((WINDOWS, share), (ON_AVERAGE, share_on_average(prices, share, len(trial.following)))):
            with model_with(model, Kind(FITTED, kept), prices) as changed:
                yield name, share, score(changed, trial, cut(changed, full), last)
        for name in presses:
            yield name, share, score(model, trial, *read(model, trial, PRESSES[name](1 - share)))


def share_on_average(prices: Prices, share: float, scored: int) -> float:
    """The share of a prompt's bytes for windows that hold, on average between the prompt and the end of `scored` more
    tokens, what a cache holds that keeps `share` and all that follows."""
    allowed = share * prices.length + scored / 2

    def held(kept: float) -> float:
        """Positions of a head, on average over heads and over the two ends."""
        layers: dict[int, list[int]] = {}
        for (layer, _), width in sorted(choose(prices, kept).widths.items()):
            layers.setdefault(layer, []).append(ALL if width is None else width)
        ends = prices.length, prices.length + scored
        positions = sum(
            positions_held(tuple(sorted(widths)), end, prices.sinks) for widths in layers.values() for end in ends
        )
        return positions / 2 / sum(map(len, layers.values()))

    low, high = share, min(0.999, allowed / prices.length)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) <= allowed else (low, middle)
    return low


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and save; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("fits", nargs="+", type=Path)
    parser.add_argument("--keep", default="50%,25%")
    parser.add_argument(
        "--presses", default="SnapKV,ExpectedAttention,StreamingLLM",
        help=f"some of {', '.join(PRESSES)}; rows of others stay in the JSON file",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    reader, presses = load_reader(given.model), [name for name in given.presses.split(",") if name]
    stream, shares = reader.stream("bundled"), [parse_share(part) for part in given.keep.split(",")]
    rows = earlier(given.json, {FULL, WINDOWS, ON_AVERAGE, *presses})
    for prices in sorted(map(load_prices, given.fits), key=lambda each: each.length):
        for number in range(given.prompts):
            random = Random(f"{given.seed} {prices.length} {number}")
            trial = make_trial(reader, stream, prices.length, given.scored, random)
            whole: Tensor | None = None
            for name, share, scored in measure(reader, prices, trial, shares, presses):
                logits = scored["logits"]
                whole = logits if whole is None else whole
                kl = (whole.softmax(-1) * (whole.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
                row = rows.setdefault(
                    (prices.length, name, share),
                    {"length": prices.length, "method": name, "keep": share, "bytes": 0, "end_bytes": 0, "losses": [],
                     "divergences": [], "found": []},
                )  # fmt: skip
                row.update({size: max(row[size], scored[size]) for size in ("bytes", "end_bytes")})
                row["losses"].append(round(float(cross_entropy(logits, trial.following)), 6))
                row["divergences"].append(round(float(kl), 6))
                row["found"].append(scored["found"])
            print(f"{prices.length:,} tokens: {number + 1} of {given.prompts} prompts", flush=True)
            if given.json is not None:
                made = {"model": given.model, "scored": given.scored, "seed": given.seed, "rows": in_order(rows)}
                write_whole(given.json, to_json(made))
    show(in_order(rows))
    return in_order(rows)


Rows = dict[tuple[int, str, float | None], dict[str, Any]]


def earlier(file: Path | None, methods: set[str]) -> Rows:
    """Rows of a file that are of other methods than these; its prompts must be the same, which is not checked."""
    if file is None or not file.exists():
        return {}
    known = read_json(file, "rows of this tool")["rows"]
    return {(row["length"], row["method"], row["keep"]): row for row in known if row["method"] not in methods}


def in_order(rows: Rows) -> list[dict[str, Any]]:
    """By length and share, the full cache first."""
    order = [FULL, WINDOWS, ON_AVERAGE, *PRESSES]
    return sorted(rows.values(), key=lambda row: (row["length"], -(row["keep"] or 1.0), order.index(row["method"])))


def show(rows: list[dict[str, Any]]) -> None:
    """Print each row, with the change of perplexity from the full cache and its paired 95% interval."""
    for row in rows:
        full = next(each for each in rows if (each["length"], each["method"]) == (row["length"], FULL))
        changed = change_text(row["losses"], full["losses"])
        share = "" if row["keep"] is None else f"{row['keep']:.0%}"
        print(
            f"{row['length']:6,}  {row['method']:30} {share:4}  {row['bytes'] / 1e6:.1f} … "
            f"{row['end_bytes'] / 1e6:.1f} MB  perplexity {changed} %  "
            f"KL {np.mean(row['divergences']):.3f}  keys {sum(row['found'])} of {len(row['found'])}"
        )


if __name__ == "__main__":
    main()
