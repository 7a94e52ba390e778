"""What the fields of result files may hold, one dict a kind: field → check.

A check takes a value and returns None, or what is wrong with it. A field whose name ends with `?` may be absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bayesattn.errors import is_number, is_whole, shown

# What is wrong: the place within the value, such as `[3].trials`, and the rest of the sentence.
Wrong = tuple[str, str]
Check = Callable[[Any], "Wrong | None"]
Fields = Mapping[str, Check]

# More tokens, trials, layers or bytes than any model has; beyond that somebody confused two numbers.
MOST = 2**60
# Rounding of the numbers in a file.
ROUNDING = 1e-4


def mismatch(kind: str, content: Mapping[str, Any]) -> str | None:
    """The first field of a result of this kind that is wrong, as the end of a sentence; None if there is none."""
    wrong = SCHEMAS[kind](content) if kind in SCHEMAS else None
    if wrong is None:
        return None
    place, what = wrong
    return f"{place.removeprefix('.') or 'it'} {what}"


def text(value: Any) -> Wrong | None:
    return None if isinstance(value, str) and "\0" not in value else ("", f"is {shown(value)}; a text is needed")


def yes_or_no(value: Any) -> Wrong | None:
    return None if isinstance(value, bool) else ("", f"is {shown(value)}; true or false is needed")


def whole(least: int = 0, most: int = MOST) -> Check:
    def check(value: Any) -> Wrong | None:
        if is_whole(value, least, most):
            return None
        return "", f"is {shown(value)}; a whole number of at least {least} is needed"

    return check


def number(least: float = -1e300, most: float = 1e300) -> Check:
    needed = "a number" + (f" of at least {least:g}" if least > -1e300 else "")
    needed += f"{' and' if least > -1e300 else ' of'} at most {most:g}" if most < 1e300 else ""

    def check(value: Any) -> Wrong | None:
        return None if is_number(value) and least <= value <= most else ("", f"is {shown(value)}; {needed} is needed")

    return check


def share(value: Any) -> Wrong | None:
    """From 0 to 1, with room for rounding."""
    if is_number(value) and -ROUNDING <= value <= 1 + ROUNDING:
        return None
    return "", f"is {shown(value)}; a number from 0 to 1 is needed"


def or_null(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def one_of(*allowed: str) -> Check:
    def check(value: Any) -> Wrong | None:
        known = isinstance(value, str) and value in allowed
        return None if known else ("", f"is {shown(value)}; {' or '.join(allowed)} is needed")

    return check


def several(check: Check, least: int = 0, exactly: int | None = None) -> Check:
    """A list of such values."""
    needed = f"a list of {exactly}" if exactly is not None else f"a list of at least {least}" if least else "a list"

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, list) or len(value) < least or (exactly is not None and len(value) != exactly):
            return "", f"is {shown(value)}; {needed} is needed"
        for place, entry in enumerate(value):
            if wrong := check(entry):
                return f"[{place}]{wrong[0]}", wrong[1]
        return None

    return check_all


def table_of(check: Check) -> Check:
    """Such values by name."""

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, dict):
            return "", f"is {shown(value)}; names with values are needed"
        for name, entry in value.items():
            if wrong := check(entry):
                return f".{shown(name)}{wrong[0]}", wrong[1]
        return None

    return check_all


def record(fields: Fields, also: Check | None = None) -> Check:
    """A dict with these fields, and maybe others; `also` checks how they fit together."""

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, dict):
            return "", f"is {shown(value)}; names with values are needed"
        for key, check in fields.items():
            name = key.removesuffix("?")
            if name not in value:
                if name == key:
                    return "", f"has no {name}"
                continue
            if wrong := check(value[name]):
                return f".{name}{wrong[0]}", wrong[1]
        return also(value) if also else None

    return check_all


def _cell_fits(cell: Mapping[str, Any]) -> Wrong | None:
    """Counts and shares of a cell follow from its outcomes."""
    trials, correct = cell["trials"], cell["correct"]
    if trials != len(cell["outcomes"]):
        return ".trials", f"is {trials} and there are {len(cell['outcomes'])} outcomes; both must be the same"
    if correct > trials:
        return ".correct", f"is {correct} of {trials} trials; at most all of them are allowed"
    if abs(correct - sum(score for _, score in cell["outcomes"])) > ROUNDING * max(1, trials):
        return ".correct", f"is {correct}, which is not the sum of the outcomes"
    share = correct / trials if trials else None
    if (share is None) != (cell["accuracy"] is None) or (
        share is not None and not math.isclose(share, cell["accuracy"], abs_tol=ROUNDING)
    ):
        return ".accuracy", f"is {shown(cell['accuracy'])} and {correct} of {trials} trials are right"
    return None


def _heads_fit(layer: Mapping[str, Any]) -> Wrong | None:
    """All lists of a layer have its heads, and all profiles the same distances."""
    heads, distances = len(layer["profile"]), len(layer["profile"][0])
    for name in ("profile", "prior"):
        if any(len(row) != distances for row in layer.get(name, ())):
            return f".{name}", f"has rows of different lengths; {distances} numbers are needed in each"
    for name in ("beta", "scale", "divergence", "prior"):
        if name in layer and len(layer[name]) != heads:
            return f".{name}", f"has {len(layer[name])} values for {heads} heads"
    return None


def _lengths_fit(content: Mapping[str, Any]) -> Wrong | None:
    """Heads have a value for each length, and layers all have the same distances."""
    for place, head in enumerate(content["heads"]):
        if len(head["effective"]) != len(content["lengths"]):
            values = f"{len(head['effective'])} values for {len(content['lengths'])} lengths"
            return f".heads[{place}].effective", f"has {values}"
    first = content["posteriors"][0]
    for place, layer in enumerate(content["posteriors"]):
        if len(layer["profile"][0]) != len(first["profile"][0]):
            return f".posteriors[{place}].profile", "has other distances than the first layer"
    return None


def _positions_fit(content: Mapping[str, Any]) -> Wrong | None:
    """By position, it is known how much of which texts was read."""
    for place, model in enumerate(content["models"] if content["by"] == "position" else ()):
        for name in ("length", "texts"):
            if name not in model:
                return f".models[{place}]", f"has no {name}"
    return None


TOKENS = whole(1)
AMOUNT = number(0)

CELL = record(
    {
        "length": TOKENS,
        "trials": whole(),
        "correct": AMOUNT,
        "accuracy": or_null(share),
        "low": share,
        "high": share,
        "seconds": AMOUNT,
        "planned": whole(),
        "note": text,
        "outcomes": several(several(share, exactly=2)),
        "task?": text,
    },
    also=_cell_fits,
)  # fmt: skip
RUN: Fields = {"model": text, "train_length": TOKENS, "fingerprint?": text, "command?": text}

PASSKEY = record(
    {
        **RUN,
        "settings": record(
            {
                "wording": text,
                "haystack": text,
                "needles?": several(TOKENS, exactly=2),
                "digits": TOKENS,
                "teacher_forced": yes_or_no,
                "seed": whole(),
                "depths": or_null(TOKENS),
            }
        ),
        "cells": several(CELL),
    }
)
NEEDLE = record(
    {
        **RUN,
        "settings": record({"name": text, "seed": whole(), "depths?": or_null(TOKENS)}),
        "cells": several(CELL),
    }
)
PERPLEXITY_ROW = record(
    {
        "context": whole(),
        "windows": TOKENS,
        "perplexity": number(1e-300),
        "low": number(1e-300),
        "high": number(1e-300),
        "change": number(),
        "change_low": number(),
        "change_high": number(),
        "seconds": AMOUNT,
        "losses": several(number(), least=2),
    }
)
PERPLEXITY = record(
    {
        "models": several(
            record(
                {
                    **RUN,
                    "effective_context": whole(),
                    "rows": several(PERPLEXITY_ROW, least=1),
                    "starts?": several(whole(), least=2),
                    "window?": whole(2),
                    "contexts?": several(whole(), least=1),
                    "length?": TOKENS,
                    "texts?": text,
                }
            )
        ),
        "by": one_of("context", "position"),
        "text": text,
        "windows": whole(2),
        "command?": text,
    },
    also=_positions_fit,
)
HEAD = record(
    {
        "layer": whole(),
        "head": whole(),
        "kind": text,
        "parameters": table_of(or_null(number())),
        "temperature?": several(or_null(number())),
        "span_3": whole(),
        "span_6": whole(),
        "effective": several(AMOUNT),
    }
)
POSTERIOR = record(
    {
        "layer": whole(),
        "profile": several(several(share, least=1), least=1),
        "beta": several(or_null(number())),
        "scale": several(or_null(number())),
        "divergence": several(or_null(number())),
        "prior?": several(several(share, least=1), least=1),
    },
    also=_heads_fit,
)
INSPECT = record(
    {
        "model": text,
        "heads": several(HEAD),
        "posteriors": several(POSTERIOR, least=1),
        "cache": several(record({"length": TOKENS, "full": TOKENS, "kept?": whole()})),
        "lengths": several(TOKENS, least=1),
        "fingerprint?": text,
        "train_length?": TOKENS,
        "command?": text,
    },
    also=_lengths_fit,
)
STAGE = record(
    {
        "tokens": number(1),
        "length": TOKENS,
        "flops_full": AMOUNT,
        "flops_causal": AMOUNT,
        "share_full": share,
        "share_causal": share,
        "share_blog": share,
        "attention_share_full": share,
        "attention_share_causal": share,
    }
)
SAVINGS = record(
    {
        "parameters": TOKENS,
        "stages": several(STAGE, least=1),
        "model": text,
        "matmul_parameters": TOKENS,
        "attention_per_token": TOKENS,
        "hardware": text,
        "peak": number(1),
        "mfu": number(1e-12, 1),
        "price": AMOUNT,
        "command?": text,
    }
)
ADVICE = record(
    {
        "model": text,
        "length": TOKENS,
        "delta": number(0),
        "usable": TOKENS,
        "heads": several(
            record({"layer": whole(), "head": whole(), "kind": text, "effective": AMOUNT, "reach": whole()})
        ),
    }
)
HARNESS = record({"model": text, "length": TOKENS, "results": table_of(table_of(lambda _: None))})
CONVERGENCE = record({"replicates": TOKENS, "seed": whole(), "rows": several(table_of(lambda _: None), least=1)})

SCHEMAS: dict[str, Check] = {
    "passkey": PASSKEY,
    "needle": NEEDLE,
    "perplexity": PERPLEXITY,
    "inspect": INSPECT,
    "savings": SAVINGS,
    "advise": ADVICE,
    "harness": HARNESS,
    **{f"convergence{study}": CONVERGENCE for study in ("", "-uniform", "-hardmax", "-model", "-prior")},
}
