"""What a model loses when its cache keeps a share of its bytes: fitted windows, and one window for all heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import typer

from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError, shown
from bayesattn.schemas import Number, Row, Share, Tokens, Whole, Wrong, at_least
from bayesattn.studies import study
from bayesattn.studies.fit.run import Fitted, hash_of, parse_share
from bayesattn.studies.options import Budget, Model, Seed, Text, Tokenizer
from bayesattn.studies.study import Progress, Result, Study

FULL: Final = "full"
WINDOW: Final = "window"
FITTED: Final = "fitted"
Method = Literal["full", "window", "fitted"]


@dataclass(frozen=True)
class Settings(study.Settings):
    """Measure what a share of the cache costs.

    The model reads a prompt with a pass key in it, and its cache keeps what it is allowed. Then it predicts the next
    tokens, and is asked for the key. Windows that `bayesattn fit` chose are compared with one window for all heads that
    takes as many bytes, and with the full cache, on the same prompts. Changes have paired 95% intervals.

    Example: bayesattn eval cache runs/smollm2 runs/smollm2-30/fit.json --keep 50%,30% --prefill full --prompts 20
    """

    file: ClassVar[str] = "cache"
    pictures: ClassVar[tuple[str, ...]] = ("cache",)
    named: ClassVar[tuple[str, ...]] = ("model", "prefill", "text", "seed")

    model: Model
    fits: Annotated[
        list[Path],
        typer.Argument(metavar="FIT.json…", help="Results of `bayesattn fit` for this model: one of each length."),
    ]
    keep: Annotated[str, typer.Option(metavar="SHARE,…", help="Shares of the cache's bytes.")] = "50%,30%,20%,10%"
    prompts: Annotated[int, typer.Option(min=2, max=10**5, help="Number of prompts of each length.")] = 20
    prefill: Annotated[
        Literal["windows", "full"],
        typer.Option(
            help="windows: they act while the prompt is read; full: the prompt is read with the full cache, which is "
            "cut afterwards."
        ),
    ] = "windows"
    scored: Annotated[int, typer.Option(min=1, max=2**16, help="Number of tokens to predict after a prompt.")] = 256
    text: Text = BUNDLED
    budget: Budget = None
    tokenizer: Tokenizer = None
    seed: Seed = 0


@dataclass(frozen=True)
class Way(Row):
    """One way to keep a cache after prompts of one length; lists have an entry for each prompt.

    Args:
        method: `full`, `window` (one width for all heads) or `fitted`.
        keep: the share that was allowed; None for the full cache.
        bytes: what the cache holds after the prompt, spare room included.
        losses: mean loss of the tokens after the prompt.
        divergences: Kullback–Leibler divergence of their predictions from those with the full cache, in nats a token.
        found: whether each token of the pass key was the likeliest one.
        width: of the one window.
    """

    length: Tokens
    method: Method
    bytes: Whole
    losses: list[Number] = field(metadata={"digits": 6})
    divergences: list[Number] = field(metadata={"digits": 6})
    found: list[bool]
    keep: Share | None = None
    width: Tokens | None = None

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return {FULL: "full cache", WINDOW: f"window of {self.width or 0:,}", FITTED: "fitted windows"}[self.method]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, sum(self.losses) / len(self.losses)))


@dataclass(frozen=True, kw_only=True)
class CacheShares(Result):
    """Ways by length, method and share.

    `prefill` is whether windows act while a prompt is read, or the full cache is cut afterwards. `fitted_on` are hashes
    of the texts that windows were fitted on.
    """

    model: str
    fingerprint: str
    text: str
    seed: Whole
    scored: Tokens
    fitted_on: list[str]
    prefill: Literal["windows", "full"]
    ways: Annotated[list[Way], at_least(1)]

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
        """Every way has the prompts of the full cache at its length."""
        numbers = {way["length"]: len(way["losses"]) for way in content["ways"] if way["method"] == FULL}
        for place, way in enumerate(content["ways"]):
            for name in ("losses", "divergences", "found"):
                if len(way[name]) != numbers.get(way["length"]) or not way[name]:
                    return f".ways[{place}].{name}", f"has {len(way[name])} prompts, and the full cache other ones"
        return None


def run(settings: Settings, progress: Progress[CacheShares]) -> CacheShares:
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.studies.cache_shares.measure import measure
    from bayesattn.studies.results import load_result

    shares = [parse_share(part) for part in settings.keep.split(",")]
    fits: list[Fitted] = []
    for path in settings.fits:
        _, result = load_result(path)
        if not isinstance(result, Fitted) or not result.heads:
            raise UserError(f"{shown(str(path))} is no finished result of `bayesattn fit`; one is needed")
        fits.append(result)
    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    known: dict[str, Any] = {
        "model": settings.model, "fingerprint": reader.fingerprint, "text": settings.text, "seed": settings.seed,
        "scored": settings.scored, "prefill": settings.prefill, "fitted_on": [fit.prices.texts for fit in fits],
    }  # fmt: skip
    earlier = progress.earlier(known)
    result = CacheShares(**known, ways=[] if earlier is None else earlier.ways)
    stream = reader.stream(settings.text)
    for path, fit in zip(settings.fits, fits, strict=True):
        if fit.tokens == hash_of(stream):
            raise UserError(
                f"the windows of {path} were fitted on the tokens of {settings.text}; another text is needed"
            )
    for ways in measure(
        reader, stream, [fit.prices for fit in fits], shares, settings.prompts, settings.scored, settings.seed,
        result.ways, progress, settings.prefill == "full",
    ):  # fmt: skip
        result = replace(result, ways=ways)
        progress.keep(result)
    if not result.ways:
        raise UserError("the time was used up before the first prompt; give it more")
    return result


STUDY = Study(kind="cache", commands={"eval cache": Settings}, run=run, result=CacheShares, place=35)
