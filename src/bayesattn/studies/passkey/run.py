"""Pass-key retrieval with growing prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from bayesattn.errors import UserError, shown
from bayesattn.schemas import Anything, Wrong, one_of, or_null, record, several, text, whole, yes_or_no
from bayesattn.studies import study
from bayesattn.studies.options import (
    Budget,
    Model,
    Multiples,
    Seed,
    Stop,
    Tokenizer,
    parse_count,
    parse_multiples,
)
from bayesattn.studies.retrieval import Retrieval, continued, identity, run_trials
from bayesattn.studies.study import Progress, Study

if TYPE_CHECKING:
    from bayesattn.evaluation.reader import Reader
    from bayesattn.evaluation.trials import Task

TRIALS = 100
# Depths of the paper's protocol, and so its trials at each length.
PAPER_DEPTHS = 20
# Values of options that the paper's protocol has, the defaults included.
PAPER_VALUES = {
    "wording": ("standard",), "haystack": ("", "bland"), "keys": ("3-5", "1"), "digits": (5,),
    "depths": ("random", str(PAPER_DEPTHS)),
}  # fmt: skip


@dataclass(frozen=True)
class Settings(study.Settings):
    """Count the keys that a model finds in prompts of any length.

    Keys are at random depths, and the model answers by greedy generation. Shares have 95% Wilson intervals. Results are
    saved after every batch; the same command resumes a stopped run.

    Example: bayesattn eval passkey bam-tiny --lengths 1x,64x,500x --trials 100 --seed 1 --json passkey.json
    """

    file: ClassVar[str] = "passkey"
    pictures: ClassVar[tuple[str, ...]] = ("passkey", "depths")
    named: ClassVar[tuple[str, ...]] = (
        "model", "protocol", "wording", "haystack", "keys", "digits", "depths", "teacher_forced", "seed",
    )  # fmt: skip

    model: Model
    lengths: Multiples = "1x,4x,16x,64x,500x"
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            show_default=False,
            help=f"Number of trials at each length. [default: {TRIALS}; {PAPER_DEPTHS} with --protocol paper]",
        ),
    ] = None
    protocol: Annotated[
        Literal["bayesattn", "paper"],
        typer.Option(
            help="paper: the evaluation of the BAM paper, with its prompts, keys, 20 even depths and teacher forcing."
        ),
    ] = "bayesattn"
    depths: Annotated[
        str, typer.Option(metavar="random|N", help="Depths of the keys: random, or N evenly spaced depths in turn.")
    ] = "random"
    wording: Annotated[
        str,
        typer.Option(
            help="standard: the usual pass-key prompt; train, validation or fresh: competing facts in these wordings."
        ),
    ] = "standard"
    keys: Annotated[
        str, typer.Option(metavar="N|N-N", help="Number of competing facts; the standard wording has one.")
    ] = "3-5"
    digits: Annotated[int, typer.Option(help="Number of digits of each key.")] = 5
    haystack: Annotated[
        str,
        typer.Option(metavar="bland|hard|text|FILE", help="Text around the keys; the default depends on the wording."),
    ] = ""
    teacher_forced: Annotated[
        bool, typer.Option("--teacher-forced", help="Predict each digit after the true ones; easier than generation.")
    ] = False
    budget: Budget = None
    stop: Stop = True
    dense: Annotated[
        bool, typer.Option("--dense", help="Compare with dense attention on one prompt of the longest length.")
    ] = False
    tokenizer: Tokenizer = None
    seed: Seed = 0

    def task(self) -> Task:
        """What to ask."""
        from bayesattn.evaluation.paper_passkey import PaperTask
        from bayesattn.evaluation.passkey import Task

        if self.protocol == "paper":
            self._check_paper()
            return PaperTask()
        least, _, most = self.keys.partition("-")
        return Task(
            wording=self.wording,  # type: ignore[arg-type]
            haystack=self.haystack,
            needles=(parse_count(least, "--keys"), parse_count(most or least, "--keys")),
            digits=self.digits,
            teacher_forced=self.teacher_forced,
        )

    def _check_paper(self) -> None:
        """An option that contradicts the paper's protocol raises an error."""
        for name, allowed in PAPER_VALUES.items():
            if (value := getattr(self, name)) not in allowed:
                raise UserError(
                    f"--{name} is {shown(value)} and --protocol paper has {allowed[-1]}; leave one of the two out"
                )
        if self.trials is not None and self.trials % PAPER_DEPTHS:
            raise UserError(
                f"--trials is {self.trials} and --protocol paper has {PAPER_DEPTHS} depths; a multiple of that is "
                "needed, so that each depth has as many"
            )

    @property
    def trials_at_each(self) -> int:
        """Trials at each length."""
        return self.trials or (PAPER_DEPTHS if self.protocol == "paper" else TRIALS)

    @property
    def even_depths(self) -> int | None:
        """Evenly spaced depths of the keys; None for random ones."""
        if self.protocol == "paper":
            return PAPER_DEPTHS
        return None if self.depths == "random" else parse_count(self.depths, "--depths")


def _wording(value: Any) -> Wrong | None:
    if value == "held-out":
        return "", "is 'held-out', which is now 'validation'; rename it in the file"
    return text(value)


@dataclass(frozen=True, kw_only=True)
class Passkey(Retrieval):
    """Trials by length, each right or wrong."""

    settings: Annotated[
        dict[str, Anything],
        record(
            {
                "protocol?": one_of("paper"),
                "wording": _wording,
                "haystack": text,
                "needles?": several(whole(1), exactly=2),
                "digits": whole(1),
                "teacher_forced": yes_or_no,
                "seed": whole(),
                "depths": or_null(whole(1)),
            }
        ),
    ]

    @property
    def title(self) -> str:
        """What was asked, and how."""
        settings = self.settings
        how = "teacher-forced" if settings["teacher_forced"] else "greedy generation"
        if settings.get("protocol") == "paper":
            return f"the paper's protocol, {settings['digits']} digits, {how}, {settings['depths']} depths"
        title = f"{settings['wording']} wording, {settings['haystack']} haystack, {settings['digits']} digits, {how}"
        if settings["wording"] != "standard" and "needles" in settings:
            title += ", {} to {} keys".format(*settings["needles"])
        return title if settings["depths"] is None else f"{title}, {settings['depths']} depths"


def run(settings: Settings, progress: Progress[Passkey]) -> Passkey:
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.studies.passkey import dense

    task, depths = settings.task(), settings.even_depths
    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    if settings.dense:
        dense.check(reader)
    lengths = parse_multiples(settings.lengths, reader.train_length)
    for result in measure(
        progress, reader, task, lengths, settings.trials_at_each, seed=settings.seed, depths=depths, stop=settings.stop
    ):
        progress.keep(result)
    if settings.dense:
        progress.step(f"reading {lengths[-1]:,} tokens with dense attention")
        result = replace(result, dense=dense.compare(reader, task, lengths[-1], settings.seed).to_dict())
    return result


def measure(
    progress: Progress[Passkey],
    reader: Reader,
    task: Task,
    lengths: list[int],
    trials: int,
    *,
    seed: int = 0,
    depths: int | None = None,
    stop: bool = True,
    **options: Any,
) -> Iterator[Passkey]:
    """The result after every batch of trials. Trials of an earlier result are not repeated."""
    extent = {"trials": trials, "budget": progress.budget, "stop": stop}
    known = {**identity(reader), "settings": {**task.settings(), "seed": seed, "depths": depths}}
    earlier = progress.earlier(known)
    done = continued(earlier, extent, trials)
    options |= {"seed": seed, "depths": depths, "stop": stop, "budget": progress.budget}
    for cells in run_trials(progress, reader, task, lengths, trials, done, **options):
        yield Passkey(**known, cells=cells, extent=extent, dense=earlier.dense if earlier else None)


STUDY = Study(
    kind="passkey",
    commands={"eval passkey": Settings},
    run=run,
    result=Passkey,
    place=10,
    trials=lambda result: {("passkey", cell.length): cell for cell in result.cells},
)
