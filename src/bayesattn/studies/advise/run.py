"""How much context each head of a model uses, and how much the whole model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.schemas import Amount, Row, Tokens, Whole
from bayesattn.studies import study
from bayesattn.studies.options import Model, Text, Tokenizer, finite
from bayesattn.studies.study import Progress, Result, Study

# First tokens that a model without a prior of ours keeps.
SINKS = 4


@dataclass(frozen=True)
class Settings(study.Settings):
    """Show how many tokens of context each head uses.

    It also shows beyond which length more context changes nothing, measured on a text and as the prior proves.

    Example: bayesattn advise bam-tiny --length 16384
    """

    file: ClassVar[str] = "advise"
    named: ClassVar[tuple[str, ...]] = ("model",)

    model: Model
    length: Annotated[int, typer.Option(min=128, max=2**24, help="Number of tokens of context.")] = 8192
    delta: Annotated[
        float,
        typer.Option(
            callback=finite, help="Largest change of an output that you accept, in units of the largest value."
        ),
    ] = 0.01
    sinks: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1024,
            help="Number of first tokens that stay visible in every context, since trained models lean on them; by "
            "default 4 for models without a prior of ours, else those of the prior.",
        ),
    ] = None
    text: Text = "bundled"
    tokenizer: Tokenizer = None


@dataclass(frozen=True)
class Head(Row):
    """One head, measured at one length.

    Args:
        kind: kind of its prior; empty without a prior.
        effective: effective tokens of its attention, content included: the median over queries.
        reach: number of tokens before a query that are enough for this head, with the layer's inputs held fixed. More
            tokens change the output by less than δ (in units of the largest value) for 95% of the last queries. It is
            the length itself if no shorter context is enough.
        prior_effective: effective tokens of its prior, 1/Σp².
        prior_growth: factor by which `prior_effective` grows over the second half of the length. It is 2 for a uniform
            prior and 1 for a prior whose mass all lies in the first half.
        certain: number of tokens for which the prior and a bound on the content prove this; None without a proof.
    """

    layer: Whole
    head: Whole
    kind: str
    effective: Amount
    reach: Whole
    prior_effective: Amount | None
    prior_growth: Amount | None
    certain: Whole | None


@dataclass(frozen=True, kw_only=True)
class Advice(Result):
    """All heads, and the context that the model can use.

    Through one layer a token sees as far as the farthest head of that layer, and the layers add up: `usable` is the
    number of tokens that can change the last output.
    """

    length: Tokens
    delta: Amount
    usable: Tokens
    heads: list[Head]
    model: str
    training_length: Tokens | None = None
    sinks: Tokens | None = None

    def __str__(self) -> str:
        local = [head for head in self.heads if head.reach < self.length]
        count = f"{len(local)} of {len(self.heads)} heads need no more than "
        first = f", and the first {self.sinks}" if self.sinks else ""
        summary = f"{count}{max(head.reach for head in local):,} of {self.length:,} tokens{first}. " if local else ""
        rest = len(self.heads) - len(local)
        if rest:
            summary += f"{rest} of {len(self.heads)} still change with the last half: "
            return f"{summary}use all {self.length:,}, and try more."
        if self.usable < self.length:
            return (
                f"{summary}Through all layers that is {self.usable:,}: more tokens change almost nothing on this text."
            )
        return f"{summary}Through all layers that is all of them: try more."


def run(settings: Settings, progress: Progress[Advice]) -> Advice:
    from bayesattn.studies.advise.measure import advise
    from bayesattn.studies.convergence.layers import load, read_text

    progress.step(f"loading {settings.model}")
    model, tokenizer = load(settings.model, settings.tokenizer)
    ids = read_text(model, tokenizer, settings.text, settings.length)
    progress.step(f"reading {settings.length:,} tokens")
    sinks = default_sinks(model) if settings.sinks is None else settings.sinks
    return advise(model, ids, settings.delta, settings.model, sinks)


def default_sinks(model: Any) -> int:
    """First tokens that stay visible: those of the model's priors, and some if it has none."""
    from bayesattn.models.decoder import DecoderForCausalLM
    from bayesattn.studies.heads.adapted import added_priors, is_adapted

    if isinstance(model, DecoderForCausalLM):
        return 0  # they are read by distance alone
    if is_adapted(model):
        return max(
            (layer.sinks.shape[1] for layer in added_priors(model).values() if layer.sinks is not None), default=0
        )
    return SINKS


STUDY = Study(kind="advise", commands={"advise": Settings}, run=run, result=Advice, place=60)
