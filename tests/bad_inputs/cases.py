"""Whole files of results of every kind, which tests of bad input change in one place."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from bayesattn.evaluation.cells import Cell
from bayesattn.studies.results import VERSION

CELLS = [
    Cell(n, ((0.1, 1.0), (0.4, right), (0.9, right)), seconds=1.5, planned=3).to_dict()
    for n, right in ((128, 1.0), (512, 0.0))
] + [Cell(1024, planned=3, note="not tried: none right at 512").to_dict()]
RUN = {"model": "bam", "train_length": 128, "fingerprint": "0f", "command": "bayesattn eval"}
ROW = {
    "context": 0, "windows": 4, "perplexity": 25.0, "low": 20.0, "high": 30.0, "change": 0.0, "change_low": -0.1,
    "change_high": 0.1, "seconds": 1.0, "losses": [3.1, 3.2, 3.3, 3.2],
}  # fmt: skip
HEAD = {
    "layer": 0, "head": 0, "kind": "local", "parameters": {"beta": 1.0, "scale": None}, "temperature": [1.0, 1.5],
    "span_3": 77, "span_6": 99, "effective": [1.0, 2.5],
}  # fmt: skip
POSTERIOR = {
    "layer": 0, "beta": [1.0], "scale": [2.0], "divergence": [0.1], "profile": [[0.5, 0.2, 0.1]],
    "prior": [[0.6, 0.2, 0.1]],
}  # fmt: skip
STAGE = {
    "tokens": 1e12, "length": 8192, "flops_full": 1e24, "flops_causal": 9e23, "share_full": 1.0, "share_causal": 1.0,
    "share_blog": 1.0, "attention_share_full": 0.2, "attention_share_causal": 0.1,
}  # fmt: skip
DRAWS = {"replicates": 40, "seed": 0, "lengths": [64, 128]}
RATE = {"horizon": 0.2, "slope_mean": -0.5, "slope_mean_se": 0.1, "slope_cov": -0.5, "slope_cov_se": 0.1}
RESULTS: dict[str, dict[str, Any]] = {
    "passkey": {
        **RUN,
        "settings": {
            "protocol": "paper", "wording": "train", "haystack": "text", "needles": [3, 5], "digits": 5,
            "teacher_forced": False, "seed": 0, "depths": None,
        },
        "cells": CELLS,
    },
    "needle": {
        **RUN,
        "settings": {"name": "single", "seed": 0, "depths": None},
        "cells": [{**cell, "task": "single"} for cell in CELLS],
    },
    "perplexity": {
        "by": "context", "text": "bundled", "windows": 4, "command": "bayesattn eval",
        "models": [{
            **RUN, "effective_context": 0, "rows": [ROW, {**ROW, "context": 64}], "starts": [64, 192, 320, 448],
            "window": 128, "contexts": [0, 64], "length": 512, "texts": "one document",
        }],
    },
    "inspect": {
        **RUN, "lengths": [1024, 4096], "heads": [HEAD], "posteriors": [POSTERIOR],
        "cache": [{"length": 1024, "full": 10**7, "kept": 10**6}, {"length": 4096, "full": 4 * 10**7}],
    },
    "history": {
        "run": "bam-tiny", "steps": [0, 25],
        "heads": [{"layer": 0, "head": 0, "parameters": {"beta": [0.0, 0.5], "alpha": [1.0, None]}}],
    },
    "variants": {
        "runs": [{
            "name": "zeros-0", "variant": "zeros", "seed": 0, "train_length": 128, "steps": 2000,
            "cells": [{
                "task": "standard wording", "length": 128, "right": 2, "trials": 2, "seconds": 0.5, "low": 0.3,
                "high": 1.0,
            }],
            "losses": [{"text": "bundled", "context": 0, "perplexity": 25.0, "low": 20.0, "high": 30.0}],
            "heads": [{"layer": 0, "head": 0, "parameters": {"beta": -0.5}}],
        }],
    },
    "savings": {
        "model": "llama-2-7b", "parameters": 10**9, "matmul_parameters": 10**9, "attention_per_token": 10**6,
        "stages": [STAGE], "hardware": "h100", "peak": 1e15, "mfu": 0.4, "price": 2.0, "command": "bayesattn savings",
        "blog_shares": [{
            "schedule": "1T@8K,1B@128K", "share_blog": 0.5, "share": 0.1, "factor_blog": 2.0, "factor": None,
        }],
        "blog_gradual": [{
            "tokens": 1e12, "longest": 131072, "shortest": 8000, "same_cost": 2e5, "mean": 4e4, "share_blog": 0.5,
            "share": 0.1,
        }],
    },
    "advise": {
        "model": "bam", "length": 512, "delta": 0.01, "usable": 300,
        "heads": [{
            "layer": 0, "head": 0, "kind": "local", "effective": 7.5, "reach": 64, "prior_effective": 6.5,
            "prior_growth": 1.5, "certain": None,
        }],
    },
    "extend": {
        **RUN,
        "settings": {
            "haystack": "bland", "window": 64, "sinks": 4, "factor": 4.0, "group": 4, "seed": 0, "text": "bundled",
            "parts": 8,
        },
        "methods": [{
            "method": "clip", "what": "far keys at one distance", "cells": CELLS,
            "peaks": [{"length": 128, "bytes": 10**6}], "near": [[0, 1]], "keep": 0.5,
        }],
    },
    "fit": {
        "model": "llama", "text": "book.txt", "tokens": "2d", "keep": 0.3, "share": 0.29, "expected": 0.01,
        "heads": [{"layer": 0, "head": 0, "price": 0.01, "width": 32}],
        "prices": {
            "fingerprint": "0f", "texts": "1e", "length": 1024, "sinks": 4, "widths": [32, 384], "finished": True,
            "seconds": 1.5,
            "contexts": [[{
                "layer": 0, "head": 0, "text": [0.01, 0.001], "recall": [0.02, 0.01], "on_sinks": 0.5, "reach": 77.5,
            }]],
        },
    },
    "cache": {
        "model": "llama", "fingerprint": "0f", "text": "bundled", "seed": 0, "scored": 256, "prefill": "full",
        "fitted_on": ["1e"],
        "ways": [
            {
                "length": 1024, "method": method, "bytes": size, "losses": [3.0, 3.5], "divergences": [0.0, 0.1],
                "found": [True, False], "keep": 0.3, "width": 300,
            }
            for method, size in (("full", 10**7), ("window", 3 * 10**6), ("fitted", 3 * 10**6))
        ],
    },
    "harness": {"model": "bam", "length": 4096, "results": {"ruler_vt": {"acc": 0.5}}},
    "compare": {
        "rows": [{
            "task": "passkey", "length": 128, "first": "a", "second": "b", "share_first": 1.0, "share_second": 0.5,
            "trials_first": 2, "trials_second": 2, "difference": -0.5, "low": -0.9, "high": 0.2, "needed": 20,
            "note": "", "verdict": "cannot tell",
        }],
    },
    "convergence": {
        **DRAWS, "law": "sphere", "dimension": 8, "variance": 0.1, "share": 8,
        "rows": [{**RATE, "scale": 1.0, "errors_mean": [0.2, 0.1], "errors_cov": [0.1, 0.05]}],
    },
    "convergence-uniform": {
        **DRAWS, "law": "sphere", "dimension": 8, "growth": None,
        "rows": [{"radius": 1.0, "slope": -0.5, "slope_se": 0.01, "constant": 2.0, "errors": [0.2, 0.1]}],
    },
    "convergence-hardmax": {
        **DRAWS, "law": "sphere", "dimension": 8,
        "rows": [{
            "sharpness": None, "power": -0.5, "power_se": 0.1, "power_misfit": 3.0, "logarithmic": -1.0,
            "logarithmic_se": 0.1, "logarithmic_misfit": 2.0, "errors": [0.2, 0.1], "preferred": "cannot tell",
        }],
    },
    "convergence-model": {
        **DRAWS, "model": "bam", "tokens": 512, "sampling": "iid",
        "rank_correlation": {"mean": [0.1, 0.5], "covariance": [-0.1, 0.5]},
        "rows": [{**RATE, "layer": 0, "head": 0}, {**RATE, "layer": 0, "head": None}],
    },
    "convergence-prior": {
        "replicates": 40, "seed": 0, "scale": 5.0,
        "rows": [{
            "prior": "uniform", "floored": False, "lengths": [64, 128], "effective": [64.0, 128.0],
            "measured": [0.2, 0.1], "measured_se": [0.01, 0.01], "predicted": [0.2, 0.1], "ratio": 1.0,
        }],
    },
    "bench-attention": {
        "settings": {"seed": 0},
        "rows": [{
            "phase": phase, "method": "bayesattn", "tokens": 512, "seconds": 0.5, "ratio": None, "peak_bytes": 10**6,
            "error": 1e-7, "note": "",
        } for phase in ("forward", "forward + backward")],
    },
    "bench-long": {
        "settings": {"tolerance": 1e-6},
        "rows": [{
            "mix": "all local", "tokens": 512, "dense_seconds": 0.5, "pruned_seconds": 0.1, "plan_seconds": 0.01,
            "kept": 0.5, "peak_bytes": 10**6, "error": 1e-7, "note": "", "dense_peak_bytes": 10**6,
        }],
        "exponents": [{"mix": "all local", "pruned": None, "dense": None, "lengths": []}],
        "decode": [{
            "mix": "all local", "tokens": 512, "full_tokens_per_second": 100.0, "cache_tokens_per_second": 200.0,
            "full_bytes": 10**6, "cache_bytes": 10**5, "error": 1e-7,
        }],
    },
    "bench-short": {
        "settings": {"seed": 0},
        "rows": [{
            "shape": "16x4x128x32", "phase": phase, "seconds": 0.5, "plain_seconds": 0.25, "ratio": 2.0,
            "gemm_share": 0.1, "error": 1e-7, "note": "",
        } for phase in ("forward", "forward + backward")],
    },
    "bench-step": {
        "settings": {"seed": 0},
        "steps": [{
            "mix": "all local", "tokens": 256, "seconds": 1e-4, "full_seconds": 1e-5, "ratio": 10.0, "bytes": 10**5,
            "full_bytes": 10**6, "error": 1e-7,
        }],
        "generate": [{
            "model": "bam-small", "prompt": 256, "new_tokens": 128, "tokens_per_second": 100.0,
            "dynamic_tokens_per_second": 200.0, "static_tokens_per_second": 190.0, "gap": 1e-6,
        }],
        "decoding": [{
            "model": "runs/less", "prompt": 1024, "new_tokens": 105, "bytes": 10**6, "full_bytes": 10**7,
            "tokens_per_second": 20.0, "dynamic_tokens_per_second": 20.0, "static_tokens_per_second": 10.0,
            "ratio": 1.0, "gap": 1e-6,
        }],
    },
    "bench-conditioned": {
        "settings": {"seed": 0},
        "rows": [{
            "phase": phase, "prior": "Fire", "tokens": 512, "seconds": 0.5, "baseline_seconds": None, "ratio": None,
            "peak_bytes": 10**6, "error": 1e-7, "note": "needs 9 GB",
        } for phase in ("forward", "forward + backward")],
        "inkling": [{
            "layer": "full", "tokens": 512, "seconds": 0.5, "peer_seconds": 1.0, "peak_bytes": 10**6,
            "peer_peak_bytes": 10**8, "error": 1e-7, "note": "",
        }],
    },
    "bench-load": {
        "settings": {"shape": "16x4x128x32"},
        "attention": [{
            "number": 0, "method": "bayesattn", "alone": 0.5, "beside": 1.0, "longest": 2.0, "neighbour": 0.5,
            "error": 1e-7, "note": "", "slow_down": 2.0,
        }],
        "trainings": [{"number": 0, "model": "bam-tiny", "steps_per_second": [8.0, 9.0], "shares": [0.5, 0.4]}],
    },
}  # fmt: skip


def write(file: Path, kind: str, content: object = None) -> Path:
    """A file of this kind, with other contents if they are given."""
    file.write_text(json.dumps({"version": VERSION, "kind": kind, **(RESULTS[kind] if content is None else content)}))  # type: ignore[dict-item]
    return file


def changed(kind: str, field: str, value: object) -> dict[str, Any]:
    """The results of a kind with another value in a field such as `cells.0.trials`."""
    content = copy.deepcopy(RESULTS[kind])
    *path, last = field.split(".")
    part: Any = content
    for key in path:
        part = part[int(key) if isinstance(part, list) else key]
    part[int(last) if isinstance(part, list) else last] = value
    return content
