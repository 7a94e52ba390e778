"""One token at a time, of one layer and of whole models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.schemas import Amount, Row, Tokens, Whole
from bayesattn.studies.bench import runs
from bayesattn.studies.options import not_empty, parse_lengths
from bayesattn.studies.study import Progress, Study


@dataclass(frozen=True, kw_only=True)
class Settings(runs.Settings):
    """Time decoding, one token at a time.

    The peers are a full cache with plain SDPA, and generate() of a Llama. Results that differ from the float64
    reference, or from generation without a cache, are not timed. It takes about three minutes on two cores and saves
    the JSON file after every length and model. With --model, a model that `bayesattn fit` made decodes instead, in
    float32, and its peers are the same model without windows, with DynamicCache and with StaticCache.

    Example: bayesattn bench step --lengths 256,4096 --json step.json
    """

    file: ClassVar[str] = "step"
    title: ClassVar[str] = "bench-step"

    lengths: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of keys that the token sees.")] = (
        "256,1024,4096,65536"
    )
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            callback=not_empty,
            help="A model that `bayesattn fit` made: measure its decoding alone.",
        ),
    ] = None


@dataclass(frozen=True)
class Step(Row):
    """One token through `LayerCache.attend` with Scalable Softmax, and through a full cache with plain SDPA.

    `ratio` is `seconds`, None if they are wrong, over `full_seconds`.
    """

    mix: str
    tokens: Tokens
    seconds: Amount | None
    full_seconds: Amount
    ratio: Amount | None
    bytes: Whole
    full_bytes: Tokens
    error: Amount | None


@dataclass(frozen=True)
class Generation(Row):
    """Tokens a second of greedy `generate`, prompt included; ours are None if a token is wrong.

    `gap` is how far the logit of a token is below the largest, computed without a cache.
    """

    model: str
    prompt: Tokens
    new_tokens: Tokens
    tokens_per_second: Amount | None
    dynamic_tokens_per_second: runs.Positive
    static_tokens_per_second: Amount
    gap: Amount | None


@dataclass(frozen=True, kw_only=True)
class Decoding(Row):
    """Tokens a second after a prompt, one at a time, of a model with windows and of the same model without.

    `bytes` are those of the caches after the prompt. `ratio` is the speed of ours, None if a token is wrong, over that
    of the faster peer, and `gap` as in `Generation`.
    """

    model: str
    prompt: Tokens
    new_tokens: Tokens
    bytes: Tokens
    full_bytes: Tokens
    tokens_per_second: Amount | None
    dynamic_tokens_per_second: runs.Positive
    static_tokens_per_second: runs.Positive
    ratio: Amount | None
    gap: Amount


@dataclass(frozen=True, kw_only=True)
class Steps(runs.Measured):
    """One layer by mix of heads and number of keys, and whole models; or the decoding of a fitted one."""

    steps: list[Step]
    generate: list[Generation]
    decoding: list[Decoding] | None = None


def run(settings: Settings, progress: Progress[Steps]) -> Steps:
    from bayesattn.studies.bench.long.measure import most_tokens
    from bayesattn.studies.bench.step import measure

    lengths, seed = parse_lengths(settings.lengths, most_tokens()), settings.seed
    sizes = measure.sizes(lengths, seed)
    if settings.model is not None:
        return _run_model(settings.model, lengths, sizes, progress)
    result = runs.stopped(progress, sizes) or Steps(settings=sizes, steps=[], generate=[])
    for steps in runs.by_length(
        progress, "one token", lengths, result.steps, lambda missing: measure.run_steps(missing, seed)
    ):
        result = replace(result, steps=steps)
        progress.keep(result)
    for generate in runs.by_part(
        progress,
        "generate",
        list(measure.MODELS),
        result.generate,
        lambda row: row.model,
        lambda missing: measure.run_generate(missing, seed),
    ):
        result = replace(result, generate=generate)
        progress.keep(result)
    return result


def _run_model(name: str, lengths: Sequence[int], sizes: dict[str, Any], progress: Progress[Steps]) -> Steps:
    from bayesattn.studies.bench.step.fitted import run_models

    sizes = {**sizes, "model": name}
    result = runs.stopped(progress, sizes) or Steps(settings=sizes, steps=[], generate=[])
    for decoding in runs.by_part(
        progress,
        name,
        lengths,
        result.decoding or [],
        lambda row: row.prompt,
        lambda missing: run_models(name, missing),
    ):
        result = replace(result, decoding=decoding)
        progress.keep(result)
    return result


STUDY = Study(kind="bench-step", commands={"bench step": Settings}, run=run, result=Steps, place=103)
