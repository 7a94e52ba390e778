"""Result files with wrong contents: each field of each kind has a row, with the kind of value that it needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bayesattn.compute import cards, schedule
from bayesattn.compute.architecture import from_config
from bayesattn.compute.savings import inference, savings
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import load_reader
from bayesattn.report.page import make_page
from bayesattn.studies.compare.run import compare
from bayesattn.studies.needle import tasks as needle
from bayesattn.studies.results import read_results
from tests.bad_inputs.cases import RESULTS, changed, write
from tests.bad_inputs.rows import Row, check_refused
from tests.studies.saved import run_perplexity, run_trials

NAN, HUGE = float("nan"), 10**400
TEXT: list[object] = [None, 3, [], {}, "a\0b"]
FLAG: list[object] = [None, "yes", 0]
WHOLE: list[object] = [None, "many", NAN, -1, HUGE, True, 1.5]
NUMBER: list[object] = [None, "many", NAN, float("inf"), HUGE, True]
AMOUNT: list[object] = [*NUMBER, -1]
NUMBER_OR_NULL: list[object] = ["many", NAN, HUGE, True]
AMOUNT_OR_NULL: list[object] = [*NUMBER_OR_NULL, -1]
WHOLE_OR_NULL: list[object] = [*AMOUNT_OR_NULL, 1.5]
LIST: list[object] = [None, 3, "many", {}]
TABLE: list[object] = [None, 3, "many", []]

RUN = {"model": TEXT, "train_length": [*WHOLE, 0], "fingerprint": TEXT, "command": TEXT}
RATE = {
    f"rows.0.{field}": NUMBER if field in ("slope_mean", "slope_cov") else AMOUNT
    for field in ("horizon", "slope_mean", "slope_mean_se", "slope_cov", "slope_cov_se")
}
DRAWS = {
    "replicates": [*WHOLE, 0],
    "seed": WHOLE,
    "lengths": [*LIST, []],
    "lengths.0": [*WHOLE, 0],
    "rows": [*LIST, []],
    "rows.0": TABLE,
}
CELLS = {
    "cells": LIST,
    "cells.0": TABLE,
    "cells.0.length": [*WHOLE, 0],
    "cells.0.trials": [*WHOLE, 2, 4],
    "cells.0.correct": [*AMOUNT, 4, 1],
    "cells.0.accuracy": [*AMOUNT, 2, 0.5],
    "cells.0.low": [*AMOUNT, 2],
    "cells.0.high": [*AMOUNT, 2],
    "cells.0.seconds": AMOUNT,
    "cells.0.planned": WHOLE,
    "cells.0.note": TEXT,
    "cells.0.outcomes": [*LIST, []],
    "cells.0.outcomes.0": [*LIST, [], [0.1], [0.1, 1, 1]],
    "cells.0.outcomes.0.0": [*AMOUNT, 2],
    "cells.0.outcomes.0.1": [*AMOUNT, 2],
    "cells.2.accuracy": ["many", NAN, 0.5],
}
FIELDS: dict[str, dict[str, list[object]]] = {
    "passkey": {
        **RUN,
        **CELLS,
        "settings": [*TABLE, {}],
        "settings.protocol": [*TEXT, "odd"],
        "settings.wording": TEXT,
        "settings.haystack": TEXT,
        "settings.needles": [*LIST, [], [1]],
        "settings.needles.0": [*WHOLE, 0],
        "settings.digits": [*WHOLE, 0],
        "settings.teacher_forced": FLAG,
        "settings.seed": WHOLE,
        "settings.depths": ["random", NAN, 0, HUGE],
    },
    "needle": {
        **RUN,
        **CELLS,
        "settings": [*TABLE, {}],
        "settings.name": TEXT,
        "settings.seed": WHOLE,
        "settings.depths": ["random", NAN, 0, HUGE],
        "cells.0.task": TEXT,
    },
    "perplexity": {
        "by": [*TEXT, "odd"],
        "text": TEXT,
        "windows": [*WHOLE, 1],
        "command": TEXT,
        "models": LIST,
        "models.0": TABLE,
        **{f"models.0.{field}": values for field, values in RUN.items()},
        "models.0.effective_context": WHOLE,
        "models.0.starts": [*LIST, []],
        "models.0.starts.0": WHOLE,
        "models.0.window": [*WHOLE, 1],
        "models.0.contexts": [*LIST, []],
        "models.0.contexts.0": WHOLE,
        "models.0.length": [*WHOLE, 0],
        "models.0.texts": TEXT,
        "models.0.rows": [*LIST, []],
        "models.0.rows.0": TABLE,
        "models.0.rows.0.context": WHOLE,
        "models.0.rows.0.windows": [*WHOLE, 0],
        "models.0.rows.0.perplexity": [*AMOUNT, 0],
        "models.0.rows.0.low": [*AMOUNT, 0],
        "models.0.rows.0.high": [*AMOUNT, 0],
        "models.0.rows.0.change": NUMBER,
        "models.0.rows.0.change_low": NUMBER,
        "models.0.rows.0.change_high": NUMBER,
        "models.0.rows.0.seconds": AMOUNT,
        "models.0.rows.0.losses": [*LIST, [], [1.0]],
        "models.0.rows.0.losses.0": NUMBER,
    },
    "inspect": {
        **RUN,
        "lengths": [*LIST, []],
        "lengths.0": [*WHOLE, 0],
        "heads": LIST,
        "heads.0": TABLE,
        "heads.0.layer": WHOLE,
        "heads.0.head": WHOLE,
        "heads.0.kind": TEXT,
        "heads.0.parameters": TABLE,
        "heads.0.parameters.beta": NUMBER_OR_NULL,
        "heads.0.temperature": LIST,
        "heads.0.temperature.0": NUMBER_OR_NULL,
        "heads.0.span_3": WHOLE,
        "heads.0.span_6": WHOLE,
        "heads.0.effective": [*LIST, [], [1.0]],
        "heads.0.effective.0": AMOUNT,
        "posteriors": [*LIST, []],
        "posteriors.0": TABLE,
        "posteriors.0.layer": WHOLE,
        "posteriors.0.beta": [*LIST, []],
        "posteriors.0.beta.0": NUMBER_OR_NULL,
        "posteriors.0.scale": [*LIST, []],
        "posteriors.0.scale.0": NUMBER_OR_NULL,
        "posteriors.0.divergence": [*LIST, []],
        "posteriors.0.divergence.0": NUMBER_OR_NULL,
        "posteriors.0.profile": [*LIST, []],
        "posteriors.0.profile.0": [*LIST, []],
        "posteriors.0.profile.0.0": [*AMOUNT, 2],
        "posteriors.0.prior": [*LIST, [], [[0.5]]],
        "posteriors.0.prior.0": [*LIST, []],
        "posteriors.0.prior.0.0": [*AMOUNT, 2],
        "cache": LIST,
        "cache.0": TABLE,
        "cache.0.length": [*WHOLE, 0],
        "cache.0.full": [*WHOLE, 0],
        "cache.0.kept": WHOLE,
    },
    "history": {
        "run": TEXT,
        "steps": [*LIST, [], [0]],
        "steps.0": WHOLE,
        "heads": [*LIST, []],
        "heads.0": TABLE,
        "heads.0.layer": WHOLE,
        "heads.0.head": WHOLE,
        "heads.0.parameters": TABLE,
        "heads.0.parameters.beta": [*LIST, [0.1]],
        "heads.0.parameters.beta.0": NUMBER_OR_NULL,
        "heads.0.parameters.alpha": [*LIST, []],
        "heads.0.parameters.alpha.0": NUMBER_OR_NULL,
    },
    "variants": {
        "runs": [*LIST, []],
        "runs.0": TABLE,
        "runs.0.name": TEXT,
        "runs.0.variant": TEXT,
        "runs.0.seed": WHOLE,
        "runs.0.steps": WHOLE,
        "runs.0.train_length": [*WHOLE, 0],
        "runs.0.cells": LIST,
        "runs.0.cells.0": TABLE,
        "runs.0.cells.0.task": TEXT,
        "runs.0.cells.0.length": [*WHOLE, 0],
        "runs.0.cells.0.right": [*AMOUNT, 3],
        "runs.0.cells.0.trials": [*WHOLE, 0, 1],
        "runs.0.cells.0.seconds": AMOUNT,
        "runs.0.cells.0.low": [*AMOUNT, 2],
        "runs.0.cells.0.high": [*AMOUNT, 2],
        "runs.0.losses": LIST,
        "runs.0.losses.0": TABLE,
        "runs.0.losses.0.text": TEXT,
        "runs.0.losses.0.context": WHOLE,
        "runs.0.losses.0.perplexity": [*AMOUNT, 0],
        "runs.0.losses.0.low": [*AMOUNT, 0],
        "runs.0.losses.0.high": [*AMOUNT, 0],
        "runs.0.heads": LIST,
        "runs.0.heads.0": TABLE,
        "runs.0.heads.0.layer": WHOLE,
        "runs.0.heads.0.head": WHOLE,
        "runs.0.heads.0.parameters": TABLE,
        "runs.0.heads.0.parameters.beta": NUMBER_OR_NULL,
    },
    "savings": {
        "model": TEXT,
        "parameters": [*WHOLE, 0],
        "matmul_parameters": [*WHOLE, 0],
        "attention_per_token": [*WHOLE, 0],
        "stages": [*LIST, []],
        "stages.0": TABLE,
        "stages.0.tokens": [*AMOUNT, 0],
        "stages.0.length": [*WHOLE, 0],
        "stages.0.flops_full": AMOUNT,
        "stages.0.flops_causal": AMOUNT,
        "stages.0.share_full": [*AMOUNT, 2],
        "stages.0.share_causal": [*AMOUNT, 2],
        "stages.0.share_blog": [*AMOUNT, 2],
        "stages.0.attention_share_full": [*AMOUNT, 2],
        "stages.0.attention_share_causal": [*AMOUNT, 2],
        "hardware": TEXT,
        "peak": [*AMOUNT, 0],
        "mfu": [*AMOUNT, 0, 2],
        "price": AMOUNT,
        "command": TEXT,
        "blog_shares": LIST,
        "blog_shares.0": TABLE,
        "blog_shares.0.schedule": TEXT,
        "blog_shares.0.share_blog": [*AMOUNT, 2],
        "blog_shares.0.share": [*AMOUNT, 2],
        "blog_shares.0.factor_blog": AMOUNT_OR_NULL,
        "blog_shares.0.factor": AMOUNT_OR_NULL,
        "blog_gradual": LIST,
        "blog_gradual.0": TABLE,
        "blog_gradual.0.tokens": [*AMOUNT, 0],
        "blog_gradual.0.longest": [*WHOLE, 0],
        "blog_gradual.0.shortest": [*WHOLE, 0],
        "blog_gradual.0.same_cost": [*AMOUNT, 0],
        "blog_gradual.0.mean": [*AMOUNT, 0],
        "blog_gradual.0.share_blog": [*AMOUNT, 2],
        "blog_gradual.0.share": [*AMOUNT, 2],
    },
    "advise": {
        "sinks": [*WHOLE_OR_NULL, 0],
        "model": TEXT,
        "length": [*WHOLE, 0],
        "delta": AMOUNT,
        "usable": [*WHOLE, 0],
        "heads": LIST,
        "heads.0": TABLE,
        "heads.0.layer": WHOLE,
        "heads.0.head": WHOLE,
        "heads.0.kind": TEXT,
        "heads.0.effective": AMOUNT,
        "heads.0.reach": WHOLE,
        "heads.0.prior_effective": AMOUNT_OR_NULL,
        "heads.0.prior_growth": AMOUNT_OR_NULL,
        "heads.0.certain": WHOLE_OR_NULL,
    },
    "extend": {
        **RUN,
        "settings": [*TABLE, {}],
        **{f"settings.{field}": TEXT for field in ("haystack", "text")},
        **{f"settings.{field}": [*WHOLE, 0] for field in ("window", "sinks", "group", "parts")},
        "settings.factor": [*AMOUNT, 0.5],
        "settings.seed": WHOLE,
        "methods": LIST,
        "methods.0": TABLE,
        **{f"methods.0.{field}": TEXT for field in ("method", "what")},
        **{f"methods.0.{field}": values for field, values in CELLS.items()},
        "methods.0.peaks": LIST,
        "methods.0.peaks.0": TABLE,
        "methods.0.peaks.0.length": [*WHOLE, 0],
        "methods.0.peaks.0.bytes": WHOLE,
        "methods.0.near": LIST[1:],
        "methods.0.near.0": LIST,
        "methods.0.near.0.0": WHOLE,
        "methods.0.keep": [*AMOUNT_OR_NULL, 2],
    },
    "harness": {"model": TEXT, "length": [*WHOLE, 0], "results": TABLE, "results.ruler_vt": TABLE},
    "compare": {
        "rows": LIST,
        "rows.0": TABLE,
        **{f"rows.0.{field}": TEXT for field in ("task", "first", "second", "note", "verdict")},
        "rows.0.length": [*WHOLE, 0],
        **{f"rows.0.trials_{which}": WHOLE for which in ("first", "second")},
        **{f"rows.0.share_{which}": [*AMOUNT_OR_NULL, 2] for which in ("first", "second")},
        **{f"rows.0.{field}": NUMBER_OR_NULL for field in ("difference", "low", "high")},
        "rows.0.needed": WHOLE_OR_NULL,
    },
    "convergence": {
        **DRAWS,
        "law": [*TEXT, "cube"],
        "dimension": WHOLE,
        "variance": AMOUNT,
        "share": [*WHOLE, 0],
        "rows.0.scale": AMOUNT,
        **RATE,
        **{f"rows.0.errors_{moment}": [*LIST, [], [0.1]] for moment in ("mean", "cov")},
        **{f"rows.0.errors_{moment}.0": AMOUNT for moment in ("mean", "cov")},
    },
    "convergence-uniform": {
        **DRAWS,
        "law": [*TEXT, "cube"],
        "dimension": WHOLE,
        "growth": ["many", NAN, [], {}],
        **{f"rows.0.{field}": AMOUNT for field in ("radius", "slope_se", "constant")},
        "rows.0.slope": NUMBER,
        "rows.0.errors": [*LIST, [], [0.1]],
        "rows.0.errors.0": AMOUNT,
    },
    "convergence-hardmax": {
        **DRAWS,
        "law": [*TEXT, "mixture"],
        "dimension": WHOLE,
        "rows.0.sharpness": AMOUNT_OR_NULL,
        **{f"rows.0.{field}": NUMBER for field in ("power", "logarithmic")},
        **{f"rows.0.{field}_{part}": AMOUNT for field in ("power", "logarithmic") for part in ("se", "misfit")},
        "rows.0.errors": [*LIST, [], [0.1]],
        "rows.0.errors.0": AMOUNT,
        "rows.0.preferred": TEXT,
    },
    "convergence-model": {
        **DRAWS,
        "model": TEXT,
        "tokens": [*WHOLE, 0],
        "sampling": [*TEXT, "odd"],
        "rank_correlation": TABLE,
        "rank_correlation.mean": [*LIST, [], [0.1]],
        "rank_correlation.mean.0": NUMBER,
        "rank_correlation.covariance": [*LIST, [], [0.1]],
        "rank_correlation.covariance.0": NUMBER,
        **RATE,
        "rows.0.layer": [*WHOLE, 3],
        "rows.0.head": WHOLE_OR_NULL,
    },
    "convergence-prior": {
        **{field: values for field, values in DRAWS.items() if not field.startswith("lengths")},
        "scale": AMOUNT,
        "rows.0.prior": TEXT,
        "rows.0.floored": FLAG,
        "rows.0.lengths": [*LIST, []],
        "rows.0.lengths.0": [*WHOLE, 0],
        **{f"rows.0.{field}": [*LIST, [], [0.1]] for field in ("effective", "measured", "measured_se", "predicted")},
        **{f"rows.0.{field}.0": AMOUNT for field in ("effective", "measured", "measured_se")},
        "rows.0.predicted.0": [*AMOUNT, 0],
        "rows.0.ratio": AMOUNT,
    },
    "bench-attention": {
        "settings": TABLE,
        "rows": LIST,
        "rows.0": TABLE,
        "rows.0.phase": [*TEXT, "backward"],
        "rows.0.method": TEXT,
        "rows.0.note": TEXT,
        "rows.0.tokens": [*WHOLE, 0],
        **{f"rows.0.{field}": AMOUNT_OR_NULL for field in ("seconds", "ratio", "error")},
        "rows.0.peak_bytes": WHOLE_OR_NULL,
    },
    "bench-long": {
        "settings": [*TABLE, {}],
        "settings.tolerance": AMOUNT,
        **dict.fromkeys(("rows", "exponents", "decode"), LIST),
        **{f"{part}.0": TABLE for part in ("rows", "exponents", "decode")},
        **{f"{part}.0.mix": TEXT for part in ("rows", "exponents", "decode")},
        **{f"{part}.0.tokens": [*WHOLE, 0] for part in ("rows", "decode")},
        **{f"rows.0.{field}": AMOUNT_OR_NULL for field in ("dense_seconds", "pruned_seconds", "plan_seconds", "error")},
        "rows.0.kept": [*AMOUNT_OR_NULL, 2],
        "rows.0.peak_bytes": WHOLE_OR_NULL,
        "rows.0.dense_peak_bytes": WHOLE,
        "rows.0.note": TEXT,
        **{f"exponents.0.{field}": NUMBER_OR_NULL for field in ("pruned", "dense")},
        "exponents.0.lengths": LIST,
        "decode.0.full_tokens_per_second": [*AMOUNT, 0],
        "decode.0.cache_tokens_per_second": AMOUNT_OR_NULL,
        "decode.0.full_bytes": [*WHOLE, 0],
        "decode.0.cache_bytes": WHOLE,
        "decode.0.error": AMOUNT,
    },
    "bench-short": {
        "settings": TABLE,
        "rows": LIST,
        "rows.0": TABLE,
        "rows.0.shape": TEXT,
        "rows.0.phase": [*TEXT, "backward"],
        "rows.0.plain_seconds": AMOUNT,
        **{f"rows.0.{field}": AMOUNT_OR_NULL for field in ("seconds", "ratio", "gemm_share", "error")},
        "rows.0.note": TEXT,
    },
    "bench-step": {
        "settings": TABLE,
        **dict.fromkeys(("steps", "generate"), LIST),
        **dict.fromkeys(("steps.0", "generate.0"), TABLE),
        **dict.fromkeys(("steps.0.mix", "generate.0.model"), TEXT),
        **{field: [*WHOLE, 0] for field in ("steps.0.tokens", "generate.0.prompt", "generate.0.new_tokens")},
        **{f"steps.0.{field}": AMOUNT_OR_NULL for field in ("seconds", "ratio", "error")},
        "steps.0.full_seconds": AMOUNT,
        "steps.0.bytes": WHOLE,
        "steps.0.full_bytes": [*WHOLE, 0],
        **{f"generate.0.{field}": AMOUNT_OR_NULL for field in ("tokens_per_second", "gap")},
        "generate.0.dynamic_tokens_per_second": [*AMOUNT, 0],
        "generate.0.static_tokens_per_second": AMOUNT,
        "decoding": LIST[1:],
        "decoding.0": TABLE,
        "decoding.0.model": TEXT,
        **{f"decoding.0.{field}": [*WHOLE, 0] for field in ("prompt", "new_tokens", "bytes", "full_bytes")},
        **{f"decoding.0.{field}": AMOUNT_OR_NULL for field in ("tokens_per_second", "ratio")},
        **{f"decoding.0.{peer}_tokens_per_second": [*AMOUNT, 0] for peer in ("dynamic", "static")},
        "decoding.0.gap": AMOUNT,
    },
    "bench-conditioned": {
        "settings": TABLE,
        **dict.fromkeys(("rows", "inkling"), LIST),
        **dict.fromkeys(("rows.0", "inkling.0"), TABLE),
        "rows.0.phase": [*TEXT, "backward"],
        **dict.fromkeys(("rows.0.prior", "rows.0.note", "inkling.0.layer", "inkling.0.note"), TEXT),
        **{f"{part}.0.tokens": [*WHOLE, 0] for part in ("rows", "inkling")},
        **{f"rows.0.{field}": AMOUNT_OR_NULL for field in ("seconds", "baseline_seconds", "ratio", "error")},
        **{f"inkling.0.{field}": AMOUNT_OR_NULL for field in ("seconds", "peer_seconds", "error")},
        **dict.fromkeys(("rows.0.peak_bytes", "inkling.0.peak_bytes", "inkling.0.peer_peak_bytes"), WHOLE_OR_NULL),
    },
    "fit": {
        **dict.fromkeys(("model", "text", "prices.fingerprint", "prices.texts"), TEXT),
        **{key: [*AMOUNT, 2] for key in ("keep", "share", "prices.contexts.0.0.on_sinks")},
        **dict.fromkeys(("expected", "heads.0.price", "prices.seconds", "prices.contexts.0.0.reach"), AMOUNT),
        "stability": NUMBER_OR_NULL,
        "tokens": TEXT[1:],
        "heads": LIST,
        "heads.0": TABLE,
        **dict.fromkeys(("heads.0.layer", "heads.0.head", "prices.contexts.0.0.layer"), WHOLE),
        "prices.contexts.0.0.head": WHOLE,
        "heads.0.width": [*WHOLE_OR_NULL, 0],
        "prices": TABLE,
        **{key: [*WHOLE, 0] for key in ("prices.length", "prices.sinks", "prices.widths.0")},
        "prices.finished": FLAG,
        "prices.widths": [*LIST, [], [32]],
        "prices.contexts": [*LIST, [], [[]]],
        "prices.contexts.0": LIST,
        "prices.contexts.0.0": TABLE,
        **{f"prices.contexts.0.0.{field}": [*LIST, [], [0.1]] for field in ("text", "recall")},
        **{f"prices.contexts.0.0.{field}.0": AMOUNT for field in ("text", "recall")},
    },
    "cache": {
        **dict.fromkeys(("model", "fingerprint", "text", "fitted_on.0"), TEXT),
        "seed": WHOLE,
        "scored": [*WHOLE, 0],
        "fitted_on": LIST,
        "prefill": [*TEXT, "odd"],
        "ways": [*LIST, []],
        "ways.0": TABLE,
        "ways.0.length": [*WHOLE, 0],
        "ways.0.method": [*TEXT, "odd"],
        "ways.0.bytes": WHOLE,
        **{f"ways.0.{field}": [*LIST, [], [1.0]] for field in ("losses", "divergences", "found")},
        **{f"ways.0.{field}.0": NUMBER for field in ("losses", "divergences")},
        "ways.0.found.0": FLAG,
        "ways.0.keep": [*AMOUNT_OR_NULL, 2],
        "ways.0.width": [*WHOLE_OR_NULL, 0],
    },
    "bench-load": {
        "settings": [*TABLE, {}],
        "settings.shape": TEXT,
        **dict.fromkeys(("attention", "trainings"), LIST),
        **{f"{part}.0": TABLE for part in ("attention", "trainings")},
        **{f"{part}.0.number": WHOLE for part in ("attention", "trainings")},
        **dict.fromkeys(("attention.0.method", "attention.0.note", "trainings.0.model"), TEXT),
        "attention.0.alone": [*AMOUNT_OR_NULL, 0],
        **{f"attention.0.{field}": AMOUNT_OR_NULL for field in ("beside", "longest", "neighbour", "error")},
        "attention.0.slow_down": AMOUNT_OR_NULL,
        **{f"trainings.0.{field}": [*LIST, [], [0.5]] for field in ("steps_per_second", "shares")},
        **{f"trainings.0.{field}.0": [*AMOUNT, 0] for field in ("steps_per_second", "shares")},
    },
}
ROWS = [
    Row(f"{kind} {field}", value, "") for kind in FIELDS for field, values in FIELDS[kind].items() for value in values
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_wrong_value_gets_a_sentence_with_its_file_and_field(
    row: Row, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    kind, field = row.name.split()
    file = write(tmp_path / "r.json", kind, changed(kind, field, row.given))
    top = field.split(".", maxsplit=1)[0]
    check_refused(lambda: read_results(file), f"r.json is not a whole file of results: {top}")
    tried("bad inputs", 1)


@pytest.mark.parametrize("kind", RESULTS)
def test_every_field_has_a_row(kind: str) -> None:
    def fields(value: Any, path: str = "") -> Iterator[str]:
        entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1]
        for key, entry in entries:
            yield f"{path}{key}"
            if isinstance(entry, (dict, list)):
                yield from fields(entry, f"{path}{key}.")

    free = {"results.ruler_vt.acc", "settings.seed", "heads.0.parameters.scale"}  # any value, or like the one before
    assert set(fields(RESULTS[kind])) - free <= set(FIELDS[kind])


@pytest.mark.parametrize("kind", RESULTS)
def test_a_missing_field_is_named(kind: str, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    optional = {
        "fingerprint",
        "command",
        "needles",
        "blog_shares",
        "blog_gradual",
        "decoding",
        "train_length" if kind == "inspect" else "",
        "tokens" if kind == "fit" else "",
    }
    for field in set(RESULTS[kind]) - optional:
        content = {key: value for key, value in RESULTS[kind].items() if key != field}
        check_refused(lambda c=content: read_results(write(tmp_path / "r.json", kind, c)), f"it has no {field}")  # type: ignore[misc]
        tried("bad inputs", 1)


def test_by_position_the_texts_must_be_known(tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    for name in ("length", "texts"):
        content = {**changed("perplexity", "by", "position")}
        del content["models"][0][name]
        file = write(tmp_path / "r.json", "perplexity", content)
        check_refused(lambda file=file: make_page([file]), f"models[0] has no {name}")  # type: ignore[misc]
        tried("bad inputs", 1)


FILES = [
    Row("nothing", b"", "is not a file of results: it is not JSON"),
    Row("half", b'{"version": 1,', "is not a file of results: it is not JSON"),
    Row("bytes", b"\xff\xfe\x00", "is not a file of results: it is not JSON"),
    Row("nested", b"[" * 100_000, "is not a file of results: it is not JSON"),
    Row("number", b'{"version": ' + b"9" * 5000 + b"}", "is not a file of results: it is not JSON"),
    Row("half a character", b'{"version": 1, "kind": "passkey", "model": "\\ud800"}', "it is not JSON"),
    Row("list", b"[]", "is not a file of results"),
    Row("null", b"null", "is not a file of results"),
    Row("version", b'{"version": [1], "kind": "passkey"}', "has results of version [1]; this is version 1"),
    Row("kind", b'{"version": 1, "kind": {}}', "is not a file of results: its kind is {}"),
    Row("long kind", b'{"version": 1, "kind": "' + b"x" * 5000 + b'"}', "is not a file of results: its kind is 'xxx"),
]


@pytest.mark.parametrize("row", FILES, ids=lambda row: row.name)
def test_what_is_no_file_of_results_is_refused_by_all_readers(
    row: Row, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(row.given)  # type: ignore[arg-type]
    good = write(tmp_path / "good.json", "passkey")
    for read in (lambda: make_page([file]), lambda: compare([good, file]), lambda: read_results(file, "passkey")):
        check_refused(read, row.says)
        tried("bad inputs", 1)


def test_whole_files_of_every_kind_are_read(tmp_path: Path) -> None:
    for kind in RESULTS:
        assert read_results(write(tmp_path / f"{kind}.json", kind))["kind"] == kind
    assert make_page([tmp_path / f"{kind}.json" for kind in RESULTS])


def test_benchmarks_of_earlier_versions_which_name_no_kind_are_read(tmp_path: Path) -> None:
    for kind in ("bench-attention", "bench-long", "bench-short", "bench-step", "bench-load"):
        (tmp_path / f"{kind}.json").write_text(json.dumps(RESULTS[kind]))
        assert read_results(tmp_path / f"{kind}.json")["kind"] == kind
    assert "prefill, tolerance 1e-06" in make_page([tmp_path])


def test_an_evaluation_does_not_go_on_with_a_damaged_file_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    reader = load_reader("bam-tiny")
    runs: dict[str, Callable[[Path], object]] = {
        "passkey": lambda file: next(run_trials(reader, passkey.Task(), [128], 1, file)),
        "needle": lambda file: next(run_trials(reader, needle.Task(), [512], 1, file, kind="needle")),
        "perplexity": lambda file: next(run_perplexity([reader], "bundled", lambda _: [0], file)),
    }
    for kind, run in runs.items():
        file = write(tmp_path / f"{kind}.json", kind, {**RESULTS[kind], "cells": None, "models": None})
        before = file.read_bytes()
        check_refused(lambda run=run, file=file: run(file), "is None; a list is needed")  # type: ignore[misc]
        assert file.read_bytes() == before


def test_an_empty_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "passkey.json").touch()
    assert next(run_trials(load_reader("bam-tiny"), passkey.Task(), [128], 1, tmp_path / "passkey.json"))
    assert len(read_results(tmp_path / "passkey.json", "passkey")["cells"]) == 1


STAGES = schedule.parse("1T@8K")
LLAMA = cards.find("llama-2-7b")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100}
CALLS: list[tuple[str, Callable[[], object], str]] = [
    ("savings stages", lambda: savings(LLAMA, []), "at least one stage is needed"),
    ("savings stages", lambda: savings(LLAMA, "15T@8K"), "at least one stage is needed"),  # type: ignore[arg-type]
    ("savings document", lambda: savings(LLAMA, STAGES, document=0), "documents have 0 tokens"),
    ("savings document", lambda: savings(LLAMA, STAGES, document=1.5), "documents have 1.5 tokens"),  # type: ignore[arg-type]
    ("savings mfu", lambda: savings(LLAMA, STAGES).hours(None, NAN), "the utilisation is nan"),  # type: ignore[arg-type]
    ("inference local", lambda: inference(LLAMA, 10, local=NAN, span=1), "the share of local heads is nan"),
    ("inference span", lambda: inference(LLAMA, 10, local=0.5, span=HUGE), "the span of local heads is 1000"),
    ("inference length", lambda: inference(LLAMA, 0, local=0.5, span=1), "the length is 0"),
    ("schedule text", lambda: schedule.parse(3), "the schedule is 3; a text"),  # type: ignore[arg-type]
    ("schedule text", lambda: schedule.parse("9" * 5000 + "@8K"), "tokens in contexts of 8192"),
    ("schedule text", lambda: schedule.parse("x" * 5000), "cannot be read from character 1 on"),
    ("schedule tokens", lambda: schedule.llama("many"), "the schedule has 'many' long tokens"),  # type: ignore[arg-type]
    ("schedule tokens", lambda: schedule.llama(NAN), "the schedule has nan long tokens"),
    ("schedule tokens", lambda: schedule.parse_tokens("B"), "the number of tokens is 'B'"),
    ("sizes heads", lambda: from_config({**SIZES, "num_attention_heads": 0}), "num_attention_heads of the model is 0"),
    ("sizes heads", lambda: from_config({**SIZES, "num_attention_heads": "2"}), "num_attention_heads of the model is"),
    ("sizes hidden", lambda: from_config({**SIZES, "hidden_size": HUGE}), "hidden_size of the model is 1000"),
    ("sizes hidden", lambda: from_config({**SIZES, "hidden_size": NAN}), "hidden_size of the model is nan"),
    ("sizes hidden", lambda: from_config({"text_config": SIZES | {"hidden_size": -1}}), "hidden_size of the model is"),
    ("sizes layers", lambda: from_config({**SIZES, "num_hidden_layers": []}), "num_hidden_layers of the model is []"),
    ("sizes type", lambda: from_config({**SIZES, "model_type": "bam", "position": 3}), "configuration of bam is wrong"),
    ("compare files", lambda: compare([]), "0 file is given"),
    ("task wording", lambda: passkey.Task(wording=[]), "the wording is []"),  # type: ignore[arg-type]
    ("task needles", lambda: passkey.Task(needles=(3, "5")), "the numbers of keys are (3, '5')"),  # type: ignore[arg-type]
    ("task needles", lambda: passkey.Task(needles=3), "the numbers of keys are 3"),  # type: ignore[arg-type]
    ("task needles", lambda: passkey.Task(needles=(5, 3)), "5 to 3 keys are asked for"),
    ("task digits", lambda: passkey.Task(digits=True), "keys of True digits"),
    ("task digits", lambda: passkey.Task(digits=HUGE), "keys of 1000"),
    ("task haystack", lambda: passkey.Task(haystack=3), "the haystack is 3"),  # type: ignore[arg-type]
    ("task forced", lambda: passkey.Task(teacher_forced="no"), "teacher_forced is 'no'"),  # type: ignore[arg-type]
    ("task name", lambda: needle.Task([]), "there is no task []"),  # type: ignore[arg-type]
    ("task name", lambda: needle.Task("x" * 500), "there is no task 'xxx"),
    ("model name", lambda: cards.find("x" * 200), "there is no model 'xxx"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "says"), CALLS, ids=[f"{name}-{says[:30]}" for name, _, says in CALLS])
def test_functions_refuse_bad_input(
    name: str, call: Callable[[], object], says: str, tried: Callable[[str, int], None]
) -> None:
    check_refused(call, says)
    tried("bad inputs", 1)


def test_json_has_no_nan(tmp_path: Path) -> None:
    from bayesattn.files import to_json
    from bayesattn.studies.results import write_results

    content = {"a": [1.0, float("nan"), {"b": float("-inf")}], "c": (float("inf"),), "d": "caf\udce9"}
    assert json.loads(to_json(content)) == {"a": [1.0, None, {"b": None}], "c": [None], "d": "caf?"}
    write_results(tmp_path / "r.json", "bench", content)
    assert json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["a"][1] is None
