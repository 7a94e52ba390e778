"""Perplexity with growing context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from bayesattn.data.text import BUNDLED
from bayesattn.files import content_of
from bayesattn.schemas import Amount, Number, Positive, Row, Tokens, Whole, Wrong, at_least, whole
from bayesattn.studies import study
from bayesattn.studies.options import Budget, Text, Tokenizer, parse_multiples
from bayesattn.studies.study import Progress, Result, Study

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader


@dataclass(frozen=True)
class Settings(study.Settings):
    """Measure perplexity with growing context.

    Numbers have 95% intervals. By context, the model predicts the same tokens after contexts of each length. By
    position, it reads the longest of the lengths once, in each document that is long enough, or in all documents
    joined. Models with the same tokenizer share one picture. Results are saved as they come; the same command resumes a
    stopped run.

    Example: bayesattn eval perplexity bam-tiny rope-tiny --lengths 0,4x,16x,64x --json perplexity.json
    """

    file: ClassVar[str] = "perplexity"
    pictures: ClassVar[tuple[str, ...]] = ("perplexity",)
    named: ClassVar[tuple[str, ...]] = ("models", "by", "text", "windows")

    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Shipped names, folders, or Hugging Face ids.")]
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,Nx,…", help="Numbers of tokens before the windows, or multiples of the training length."
        ),
    ] = "0,4x,16x,64x"
    by: Annotated[
        Literal["context", "position"],
        typer.Option(help="context: the same windows after contexts of each length; position: whole texts, read once."),
    ] = "context"
    text: Text = BUNDLED
    windows: Annotated[
        int, typer.Option(min=2, max=2**20, help="Number of windows of the text, or of parts by position.")
    ] = 64
    budget: Budget = None
    tokenizer: Tokenizer = None


@dataclass(frozen=True)
class Loss(Row):
    """Perplexity with one number of tokens before, with 95% intervals.

    Args:
        context: tokens before the windows, or before the part.
        windows: samples of the intervals: windows, texts or stretches.
        perplexity, low, high: the estimate and its interval.
        change, change_low, change_high: the loss minus that of the first row. By context, both are on the same windows,
            so that the interval is narrower than those of the two losses.
        seconds: of the measurement.
        losses: mean loss of each sample.
    """

    context: Whole
    windows: Tokens
    perplexity: Positive
    low: Positive
    high: Positive
    change: Number
    change_low: Number
    change_high: Number
    seconds: Amount
    losses: Annotated[tuple[Number, ...], at_least(2)]


@dataclass(frozen=True)
class ModelLosses(Row):
    """The losses of one model.

    By context there are `contexts` (what was asked for), and windows of so many tokens with their starts. By position
    there are the length that was read, and which texts. `effective_context` is the shortest context after which no
    longer one lowers the loss significantly.
    """

    model: str
    train_length: Tokens
    effective_context: Whole
    rows: Annotated[list[Loss], at_least(1)]
    fingerprint: str | None = None
    command: str | None = None
    starts: Annotated[list[Whole], at_least(2)] | None = None
    window: Annotated[int, whole(2)] | None = None
    contexts: Annotated[list[Whole], at_least(1)] | None = None
    length: Tokens | None = None
    texts: str | None = None


@dataclass(frozen=True, kw_only=True)
class Perplexity(Result):
    """Losses of several models on one text, by context or by position. `content` is a hash of the text."""

    models: list[ModelLosses]
    by: Literal["context", "position"]
    text: str
    windows: Annotated[int, whole(2)]
    content: str | None = None

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
        """By position, it is known how much of which texts was read."""
        for place, model in enumerate(content["models"] if content["by"] == "position" else ()):
            for name in ("length", "texts"):
                if name not in model:
                    return f".models[{place}]", f"has no {name}"
        return None


def run(settings: Settings, progress: Progress[Perplexity]) -> Perplexity:
    from bayesattn.evaluation.reader import load_reader

    def readers() -> Iterator[Reader]:
        for model in settings.models:
            progress.step(f"loading {model}")
            yield load_reader(model, settings.tokenizer)

    def lengths(reader: Reader) -> list[int]:
        return parse_multiples(settings.lengths, reader.train_length, least=0)

    for result in measure(progress, readers(), settings.text, lengths, by=settings.by, windows=settings.windows):
        progress.keep(result)
    return result


def measure(
    progress: Progress[Perplexity],
    readers: Iterable[Reader],
    source: str,
    lengths: Callable[[Reader], Sequence[int]],
    *,
    by: Literal["context", "position"] = "context",
    windows: int = 64,
) -> Iterator[Perplexity]:
    """The result so far, whenever there is more of it. By position, the longest of the lengths is read.

    What an earlier result has already is not measured again. You may add contexts later: they use the windows of the
    earlier result if these have enough text before them. If not, or by position with another length, the model is
    measured again.
    """
    from bayesattn.studies.perplexity.measure import effective_context, measure_by_context, measure_by_position

    known: dict[str, Any] = {"by": by, "text": source, "windows": windows}
    known |= {} if source == BUNDLED else content_of(source)
    earlier = progress.earlier(known)
    kept = {} if earlier is None else {entry.model: entry for entry in earlier.models}
    steps = measure_by_context if by == "context" else measure_by_position
    for reader in readers:
        before = kept.get(reader.name)
        identity = (reader.train_length, reader.fingerprint)
        if before is not None and (before.train_length, before.fingerprint) != identity:
            before = None
        for details, rows in steps(progress, reader, source, sorted(set(lengths(reader))), windows, before):
            kept[reader.name] = ModelLosses(
                reader.name, reader.train_length, effective_context(rows), rows, reader.fingerprint, **details
            )
            yield Perplexity(**known, models=list(kept.values()))


STUDY = Study(kind="perplexity", commands={"eval perplexity": Settings}, run=run, result=Perplexity, place=30)
