"""Give the heads of a pretrained model windows by what they cost, and save it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError, shown
from bayesattn.fit.price_files import Prices
from bayesattn.schemas import Amount, Number, Row, Share, Tokens, Whole, Wrong, at_least
from bayesattn.studies import study
from bayesattn.studies.options import Tokenizer, not_empty
from bayesattn.studies.study import Progress, Result, Study

if TYPE_CHECKING:
    from bayesattn.data.contexts import Tokens as Stream
    from bayesattn.evaluation.reader import Reader

Keep = Annotated[str, typer.Option(metavar="SHARE", help="Share of the cache's bytes to keep: 30% or 0.3.")]


@dataclass(frozen=True)
class Settings(study.Settings):
    """Halve the cache of a model with a window for each head.

    Weights stay as they are. The folder of the results is that of the new model as well, which every program loads that
    imports bayesattn. The same command resumes a stopped run, and with another --keep uses its measurement again.

    Example: bayesattn fit runs/smollm2 --text book.txt --keep 30% --length 8192 --out runs/smollm2-30
    """

    file: ClassVar[str] = "fit"
    pictures: ClassVar[tuple[str, ...]] = ("spans",)
    named: ClassVar[tuple[str, ...]] = ("model", "keep")

    model: Annotated[
        str,
        typer.Argument(
            callback=not_empty,
            metavar="MODEL",
            help="A folder, or a Hugging Face id, of a model of transformers without priors; not the models of "
            "bayesattn. Append +yarn:16 (or linear, dynamic) to scale rotary positions to 16 times the length.",
        ),
    ]
    text: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="A text file or a folder of text files; by default the bundled text, without the part "
            "that evaluations read.",
        ),
    ] = BUNDLED  # fmt: skip
    keep: Keep = "30%"
    length: Annotated[int, typer.Option(min=192, max=2**24, help="Number of tokens at which the share is kept.")] = 8192
    contexts: Annotated[
        int, typer.Option(min=1, max=64, help="Number of stretches of the text to measure on, of this length each.")
    ] = 2
    sinks: Annotated[
        int,
        typer.Option(
            min=1, max=2**21, help="Number of first tokens that every head keeps, at most an eighth of --length."
        ),
    ] = 4
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results of an earlier fit, whose measurement is used again.")
    ] = None
    tokenizer: Tokenizer = None


@dataclass(frozen=True)
class Head(Row):
    """What a key/value head got: the last `width` keys, or all of them if it is None; and what that costs."""

    layer: Whole
    head: Whole
    price: Amount
    width: Tokens | None = None


@dataclass(frozen=True, kw_only=True)
class Fitted(Result):
    """The windows of the heads, and the prices that they were chosen by.

    Args:
        heads: empty until the prices are all measured.
        keep: the share of the cache that was allowed.
        share: the share that it holds at the length, spare room included.
        expected: sum of the prices.
        stability: rank correlation of the prices of the heads on two halves of the contexts.
        tokens: a hash of the tokens of the text, so that no evaluation reads the same; older files have none.
    """

    model: str
    text: str
    heads: list[Head]
    prices: Prices
    keep: Share
    share: Share
    expected: Amount
    stability: Number | None = None
    tokens: str | None = None

    @staticmethod
    def fits(content: Mapping[str, object]) -> Wrong | None:
        """Prices have heads."""
        return at_least(1)(content["prices"]["contexts"][0]) and (".prices", "has no heads")  # type: ignore[index]


def parse_share(text: str, option: str = "--keep") -> float:
    """`30%` or `0.3` as a share."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(f"{option} is {shown(text)}; a share between 0 and 1, such as 30% or 0.3, is needed")
    return share


def run(settings: Settings, progress: Progress[Fitted]) -> Fitted:
    from bayesattn.data.contexts import encode_stream
    from bayesattn.data.text import documents
    from bayesattn.evaluation.reader import load_reader

    keep = parse_share(settings.keep)
    check_folder(settings.folder, settings.model)
    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    most = reader.most_positions
    if most is not None and settings.length > most:
        raise UserError(
            f"the length is {settings.length:,} tokens and {settings.model} has positions for {most:,}; give a smaller "
            "--length"
        )
    reader.check_length(settings.length)
    progress.step("encoding the text")
    stream = encode_stream(documents(settings.text, "train"), reader.tokenizer)
    result = fit(settings, reader, stream, keep, progress)
    progress.step(f"saving {settings.folder}")
    reader.model.save_pretrained(settings.folder)
    reader.tokenizer.save_pretrained(settings.folder)
    return result


def fit(settings: Settings, reader: Reader, stream: Stream, keep: float, progress: Progress[Fitted]) -> Fitted:
    """Measure the prices that are not known, and give the model its windows."""
    from bayesattn.fit.fitting import RECALL_SHARE, fit_priors
    from bayesattn.fit.price_files import load_prices
    from bayesattn.fit.prices import stability

    tokens = hash_of(stream)

    def result(prices: Prices, **fields: object) -> Fitted:
        blank = {"heads": [], "share": keep, "expected": 0.0}
        return Fitted(
            model=settings.model, text=settings.text, prices=prices, keep=keep, tokens=tokens,
            **{**blank, **fields},  # type: ignore[arg-type]
        )  # fmt: skip

    def save(prices: Prices) -> None:
        if progress.is_due():
            progress.keep(result(prices))

    earlier = progress.earlier({"model": settings.model, "text": settings.text})
    before = None if earlier is None else earlier.prices
    if settings.prices is not None:
        before = load_prices(settings.prices)
    made = fit_priors(
        reader.model, [stream], keep, length=settings.length, contexts=settings.contexts, sinks=settings.sinks,
        prices=before, step=progress.step, save=save,
    )  # fmt: skip
    prices = made.prices.of_heads(RECALL_SHARE)
    heads = [
        Head(layer, head, 0.0 if width is None else prices[layer, head][made.prices.widths.index(width)], width)
        for (layer, head), width in sorted(made.widths.items())
    ]
    return result(
        made.prices, heads=heads, share=made.share, expected=made.expected,
        stability=stability(made.prices, RECALL_SHARE),
    )  # fmt: skip


def hash_of(stream: Stream) -> str:
    """A hash of the tokens of a text."""
    return hashlib.sha256(stream.astype("int64").tobytes()).hexdigest()[:16]


def check_folder(folder: Path, model: str) -> None:
    """Raise an error for a folder whose model would be lost."""
    if (folder / "config.json").exists() and not (folder / f"{Settings.file}.json").exists():
        raise UserError(f"{folder} has a model already; the name of a new folder is needed for that of {model}")


STUDY = Study(kind="fit", commands={"fit": Settings}, run=run, result=Fitted, place=70)
