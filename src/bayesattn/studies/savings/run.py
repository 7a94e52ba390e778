"""What a training schedule costs, and what long contexts cost in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from bayesattn.compute.costs import BlogShare, Gradual, Inference, StageCost
from bayesattn.schemas import Amount, Number, Share, Tokens, at_least, number
from bayesattn.studies import study
from bayesattn.studies.options import finite
from bayesattn.studies.study import Progress, Result, Study

# Contexts of the map of savings, and the one that it compares with.
MAP_LENGTHS, MAP_SHORT = tuple(2**power for power in range(11, 21)), 512
# Lengths of the costs of inference, beside the longest of the schedule.
INFERENCE_LENGTHS = (8192, 131_072, 1_048_576)


@dataclass(frozen=True)
class Settings(study.Settings):
    """Show what long contexts cost in training, and short ones save.

    It counts FLOPs exactly, next to a popular estimate.

    Example: bayesattn savings --model llama-3.1-405b --schedule 15T@8K,100B@128K
    """

    file: ClassVar[str] = "savings"
    pictures: ClassVar[tuple[str, ...]] = ("savings",)

    model: Annotated[
        str, typer.Option(metavar="NAME", help="A public model, one of our presets (l12), or a config.json.")
    ] = "llama-3.1-405b"
    schedule: Annotated[
        str, typer.Option(metavar="T@N,…", help="Stages as tokens@length, or a preset: blog, blog-1m, llama3.")
    ] = "15T@8K,100B@128K"
    long_tokens: Annotated[
        str, typer.Option(metavar="T", help="Tokens of the long stages of llama3, split evenly.")
    ] = "800B"
    recompute: Annotated[bool, typer.Option("--recompute", help="Count activation checkpointing.")] = False
    blog: Annotated[
        bool, typer.Option("--blog", help="Add all figures of the popular estimate's blog, beside exact ones.")
    ] = False
    document: Annotated[
        int | None, typer.Option(min=1, max=2**40, metavar="N", help="Mask attention to documents of N tokens.")
    ] = None
    hardware: Annotated[str, typer.Option(help="Hardware: h100, a100, rtx4090, …")] = "h100"
    mfu: Annotated[float, typer.Option(callback=finite, help="Share of the peak FLOPs that training reaches.")] = 0.4
    price: Annotated[float, typer.Option(min=0, max=1e6, callback=finite, help="Price of one device for an hour.")] = (
        2.0
    )
    local: Annotated[float, typer.Option(callback=finite, help="Share of local heads, for the costs of inference.")] = (
        0.75
    )
    span: Annotated[int, typer.Option(min=1, max=2**40, help="Number of tokens that local heads look back.")] = 1024


@dataclass(frozen=True, kw_only=True)
class Savings(Result):
    """The cost of a schedule, and what it would be without long contexts, as in `bayesattn.compute.savings.Savings`."""

    model: str
    parameters: Tokens
    matmul_parameters: Tokens
    attention_per_token: Tokens
    stages: Annotated[list[StageCost], at_least(1)]
    hardware: str
    peak: Annotated[float, number(1)]
    mfu: Annotated[float, number(1e-12, 1)]
    price: Amount
    schedule: str | None = None
    flops: Amount | None = None
    dropped: Number | None = None
    short: Number | None = None
    blog: Number | None = None
    hours: Amount | None = None
    cost: Amount | None = None
    memory_bytes: dict[str, Amount] | None = None
    inference: list[Inference] | None = None
    local: Share | None = None
    span: Tokens | None = None
    blog_shares: list[BlogShare] | None = None
    blog_gradual: list[Gradual] | None = None


def run(settings: Settings, progress: Progress[Savings]) -> Savings:
    from bayesattn.compute import blog, cards, savings
    from bayesattn.compute.flops import find_hardware, training_memory
    from bayesattn.compute.schedule import find, parse_tokens

    architecture = cards.find(settings.model)
    stages = find(settings.schedule, parse_tokens(settings.long_tokens))
    counted = savings.savings(architecture, stages, recompute=settings.recompute, document=settings.document)
    device = find_hardware(settings.hardware)
    hours = counted.hours(device, settings.mfu)
    longest = max(stage.length for stage in stages)
    costs = [
        savings.inference(architecture, n, local=settings.local, span=settings.span)
        for n in sorted({*INFERENCE_LENGTHS, longest})
    ]
    return Savings(
        model=settings.model,
        parameters=architecture.parameters,
        matmul_parameters=architecture.matmul_parameters,
        attention_per_token=12 * architecture.layers * architecture.heads * architecture.head_size,
        schedule=settings.schedule,
        stages=counted.rows,
        flops=counted.flops,
        dropped=counted.dropped,
        short=counted.short,
        blog=counted.blog,
        hours=hours,
        cost=hours * settings.price,
        memory_bytes=training_memory(architecture, longest, recompute=settings.recompute),
        inference=costs,
        hardware=device.name,
        peak=device.flops,
        mfu=settings.mfu,
        price=settings.price,
        local=settings.local,
        span=settings.span,
        blog_shares=blog.shares(architecture) if settings.blog else None,
        blog_gradual=blog.gradual(architecture) if settings.blog else None,
    )


STUDY = Study(kind="savings", commands={"savings": Settings}, run=run, result=Savings, place=80)
