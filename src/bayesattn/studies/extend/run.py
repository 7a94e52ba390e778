"""Ways to read past the training length without training, side by side on the same prompts and the same text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError, shown
from bayesattn.evaluation.cells import Cell
from bayesattn.files import content_of
from bayesattn.schemas import Anything, Row, Share, Tokens, Whole, number, record, text, whole
from bayesattn.studies import study
from bayesattn.studies.fit.run import parse_share
from bayesattn.studies.options import Budget, Model, Multiples, Seed, Text, Tokenizer, Trials, parse_multiples
from bayesattn.studies.perplexity.run import ModelLosses
from bayesattn.studies.retrieval import identity
from bayesattn.studies.study import Progress, Result, Study

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader

# What each method does.
METHODS = {
    "as-is": "the model as it is",
    "interpolation": "rotary positions divided by the factor (position interpolation)",
    "ntk": "rotary frequencies by the length at hand (dynamic NTK)",
    "yarn": "rotary frequencies by YaRN",
    "grouped": "far keys at grouped positions (SelfExtend)",
    "grouped+log": "the same, with the log-length temperature",
    "window+sinks": "near keys and the first tokens alone",
    "clip": "far keys at the distance of the window",
    "clip+log": "the same, with the log-length temperature",
    "clip+log+fit": "the same for some heads; the others see near keys and the first tokens alone",
}
# The method that has near heads.
FITTED = "clip+log+fit"


@dataclass(frozen=True)
class Settings(study.Settings):
    """Compare ways to read past the training length.

    Each method answers the same pass-key prompts by greedy generation, and reads the same text once for its perplexity
    by position. Methods with a factor or a group have those of the longest length. Results are saved as they come; the
    same command resumes a stopped run.

    Example: bayesattn eval extend rope-tiny --window 64 --lengths 0.5x,1x,2x,4x --trials 20
    """

    file: ClassVar[str] = "extend"
    pictures: ClassVar[tuple[str, ...]] = ("extend", "extend-perplexity")
    named: ClassVar[tuple[str, ...]] = ("model", "window", "haystack", "text", "seed")

    model: Model
    lengths: Multiples = "0.5x,1x,2x,4x"
    methods: Annotated[
        str, typer.Option(metavar="NAME,…", help=f"Methods to compare: {', '.join(METHODS)}; all by default.")
    ] = ""
    window: Annotated[int, typer.Option(help="Distances below it are as they were, where a method has a window.")] = (
        2048
    )
    sinks: Annotated[int, typer.Option(min=1, max=2**20, help="First tokens that window+sinks keeps.")] = 4
    keep: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of the heads that see far keys in clip+log+fit: 50% or 0.5.")
    ] = "50%"
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Results of `bayesattn fit`, whose prices choose these heads; without it they are "
            "measured on the bundled text, at the training length or 4,096 tokens.",
        ),
    ] = None  # fmt: skip
    trials: Trials = 20
    haystack: Annotated[str, typer.Option(metavar="bland|hard|text|FILE", help="Text around the keys.")] = "bland"
    text: Text = BUNDLED
    parts: Annotated[int, typer.Option(min=2, max=2**10, help="Parts of the text by position.")] = 8
    perplexity: Annotated[bool, typer.Option(help="Read a text of the longest length, too.")] = True
    budget: Budget = None
    tokenizer: Tokenizer = None
    seed: Seed = 0

    @property
    def chosen(self) -> list[str]:
        """The methods, in the order of `METHODS`."""
        names = self.methods.split(",") if self.methods else list(METHODS)
        if unknown := [name for name in names if name not in METHODS]:
            raise UserError(f"--methods has {shown(unknown[0])}; there are {', '.join(METHODS)}")
        return [name for name in METHODS if name in names]


@dataclass(frozen=True)
class Peak(Row):
    """The most memory that one trial of a length took, above what was held before."""

    length: Tokens
    bytes: Whole


@dataclass(frozen=True)
class Method(Row):
    """What one method reached; `near` are the heads, by layer, that look only near if others do not."""

    method: str
    what: str
    cells: list[Cell]
    peaks: list[Peak]
    perplexity: ModelLosses | None = None
    near: list[list[Whole]] | None = None
    keep: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Extend(Result):
    """Each method's trials by length, memory, and perplexity by position."""

    model: str
    train_length: Tokens
    settings: Annotated[
        dict[str, Anything],
        record(
            {
                "haystack": text,
                "window": whole(1),
                "sinks": whole(1),
                "factor": number(1),
                "group": whole(2),
                "seed": whole(),
                "text": text,
                "parts": whole(2),
            }
        ),
    ]
    methods: list[Method]
    fingerprint: str | None = None


def run(settings: Settings, progress: Progress[Extend]) -> Extend:
    from bayesattn.data.text import documents
    from bayesattn.evaluation.passkey import Task
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.studies.extend.measure import Comparison
    from bayesattn.studies.extend.methods import make_sizes

    names = settings.chosen
    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    lengths = parse_multiples(settings.lengths, reader.train_length)
    sizes = make_sizes(settings.window, settings.sinks, lengths[-1], reader.train_length)
    task = Task(haystack=settings.haystack)
    known = {
        **identity(reader),
        "settings": {
            "haystack": task.haystack, **sizes.to_dict(), "seed": settings.seed, "text": settings.text,
            "parts": settings.parts, **({} if settings.text == BUNDLED else content_of(settings.text)),
        },
    }  # fmt: skip
    task.prompts(reader)  # which raises an error for a haystack that cannot be
    if settings.perplexity:
        next(documents(settings.text), None)
    earlier = progress.earlier(known)
    methods = [] if earlier is None else earlier.methods
    if FITTED in names:
        methods = with_near_heads(methods, settings, reader, progress)
    comparison = Comparison(progress, settings, sizes, task, names, methods)
    for methods in comparison.measure(lengths):
        progress.keep(Extend(**known, methods=methods))
    return Extend(**known, methods=comparison.methods())


def with_near_heads(
    methods: list[Method], settings: Settings, reader: Reader, progress: Progress[Extend]
) -> list[Method]:
    """Earlier results, with the near heads of the method that has some: chosen now, or those of before."""
    from bayesattn.adapt.extend import extensible
    from bayesattn.fit.near_heads import choose_near

    keep = parse_share(settings.keep)
    before = next((method for method in methods if method.method == FITTED), None)
    if before is not None and settings.fit is None and before.keep == keep:
        return methods
    near = choose_near(
        extensible(reader.model), settings.fit, keep, window=settings.window, tokenizer=reader.tokenizer,
        step=progress.step,
    )  # fmt: skip
    heads = [list(head) for head in near]
    if before is None:
        return [*methods, Method(FITTED, METHODS[FITTED], [], [], near=heads, keep=keep)]
    if before.near != heads:
        raise UserError(
            f"{settings.results} holds {FITTED} with other heads, of --keep {before.keep:.0%}; choose another file"
        )
    return methods


STUDY = Study(kind="extend", commands={"eval extend": Settings}, run=run, result=Extend, place=40)
