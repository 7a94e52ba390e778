"""What a share of the cache costs with the methods of kvpress, on the prompts of `bayesattn eval cache`.

kvpress pins another version of transformers than ours, so it needs an environment of its own, or
`pip install --no-deps kvpress` beside this package:

    python tools/kvpress_shares.py MODEL FIT.json --keep 50%,30%,20%,10% --prompts 20 --json kvpress.json

The lengths are those of the fits, and prompts, seeds and scores those of `bayesattn eval cache`. kvpress reads a prompt
with the full cache and compresses it afterwards; fitted windows act while it is read. Bytes are those of the tensors
that the cache holds after the prompt.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import kvpress
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from bayesattn.evaluation.intervals import half_interval
from bayesattn.evaluation.reader import load_reader
from bayesattn.fit.price_files import load_prices
from bayesattn.studies.cache_shares.measure import Trial, bytes_of, make_trial
from bayesattn.studies.fit.run import parse_share

PRESSES: dict[str, Callable[[float], Any]] = {
    "SnapKV": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio),
    "ExpectedAttention": lambda ratio: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
    "TOVA": lambda ratio: kvpress.TOVAPress(compression_ratio=ratio),
    "KeyDiff": lambda ratio: kvpress.KeyDiffPress(compression_ratio=ratio),
    "Knorm": lambda ratio: kvpress.KnormPress(compression_ratio=ratio),
    "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
}


@torch.no_grad()
def read(model: Any, trial: Trial, press: Any) -> tuple[int, Tensor, bool]:
    """Bytes after the prompt, logits of the tokens that follow, and whether the key is found; None is no press."""
    cache, length = DynamicCache(), len(trial.prompt)
    positions = torch.arange(length)
    settings = {"past_key_values": cache, "position_ids": positions[None], "cache_position": positions}
    if press is None:
        out = model(input_ids=trial.prompt[None], use_cache=True, logits_to_keep=1, **settings)
    else:
        with press(model):
            out = model(input_ids=trial.prompt[None], use_cache=True, logits_to_keep=1, **settings)
    size = bytes_of(cache)

    def after(ids: Tensor, past: DynamicCache) -> Tensor:
        positions = torch.arange(length, length + len(ids))[None]
        logits: Tensor = model(input_ids=ids[None], past_key_values=past, position_ids=positions).logits[0]
        return logits

    asked = after(torch.cat([trial.question, trial.answer[:-1]]), copy.deepcopy(cache))
    found = bool((asked[-len(trial.answer) :].argmax(-1) == trial.answer).all())
    return size, torch.cat([out.logits[0, -1:], after(trial.following[:-1], cache)]).float(), found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and save; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("fits", nargs="+", type=Path)
    parser.add_argument("--keep", default="50%,30%,20%,10%")
    parser.add_argument("--presses", default=",".join(PRESSES))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    reader = load_reader(given.model)
    stream, rows = reader.stream("bundled"), []
    shares = [parse_share(part) for part in given.keep.split(",")]
    for length in sorted(load_prices(path).length for path in given.fits):
        trials = [
            make_trial(reader, stream, length, given.scored, Random(f"{given.seed} {length} {number}"))
            for number in range(given.prompts)
        ]
        full = [read(reader.model, trial, None) for trial in trials]
        losses = np.array([float(cross_entropy(run[1], t.following)) for run, t in zip(full, trials, strict=True)])
        print(f"{length:,} tokens: {full[0][0] / 1e6:.1f} MB, {sum(run[2] for run in full)} of {len(full)} keys")
        for share in shares:
            for name in given.presses.split(","):
                runs = [read(reader.model, trial, PRESSES[name](1 - share)) for trial in trials]
                others = [float(cross_entropy(run[1], t.following)) for run, t in zip(runs, trials, strict=True)]
                kl = [
                    float((a[1].softmax(-1) * (a[1].log_softmax(-1) - b[1].log_softmax(-1))).sum(-1).mean())
                    for a, b in zip(full, runs, strict=True)
                ]
                change = np.array(others) - losses
                half = half_interval(change) if len(change) > 1 else math.inf
                low, middle, high = (100 * math.expm1(float(change.mean()) + at) for at in (-half, 0.0, half))
                found = [run[2] for run in runs]
                row = {
                    "length": length, "method": name, "keep": share, "bytes": max(run[0] for run in runs),
                    "losses": others, "divergences": kl, "found": found,
                }  # fmt: skip
                rows.append(row)
                print(
                    f"  {name:18} {share:4.0%}  {row['bytes'] / full[0][0]:4.0%} held  perplexity {middle:+.1f}% "
                    f"({low:+.1f} … {high:+.1f})  KL {np.mean(kl):.3f}  keys {sum(found)} of {len(found)}",
                    flush=True,
                )
        if given.json is not None:
            given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
