"""What each head of a model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import typer

from bayesattn.schemas import Amount, Number, Row, Share, Tokens, Whole, Wrong, at_least, digits
from bayesattn.studies import study
from bayesattn.studies.options import Model, Text, Tokenizer
from bayesattn.studies.study import Progress, Result, Study

# Lengths at which heads are described, and those of the cache.
LENGTHS = (1024, 16_384, 262_144)
CACHE_LENGTHS = (1024, 16_384, 131_072, 1_048_576)
Profiles = Annotated[list[Annotated[list[Share], at_least(1)]], at_least(1)]


@dataclass(frozen=True)
class Settings(study.Settings):
    """Show what each head does.

    It shows the prior of each head, its attention on a text, and the cache that a long text needs. For each head of any
    model, also without priors, it fits the nearest generalized Gaussian to the attention.

    Example: bayesattn inspect bam-tiny
    """

    file: ClassVar[str] = "inspect"
    pictures: ClassVar[tuple[str, ...]] = ("priors", "posteriors")
    named: ClassVar[tuple[str, ...]] = ("model",)

    model: Model
    text: Text = "bundled"
    tokens: Annotated[int, typer.Option(min=64, max=8192, help="Number of tokens to measure attention on.")] = 1024
    tokenizer: Tokenizer = None


@dataclass(frozen=True)
class Head(Row):
    """The prior of a head, scaled by its temperature, for the last query of a text.

    `temperature` and `effective` (effective tokens, 1/Σp²) have one value a length. `span_3` and `span_6` are the
    distances beyond which 1e-3 and 1e-6 of the prior lie, at the longest length.
    """

    layer: Whole
    head: Whole
    kind: str
    parameters: dict[str, Number | None]
    span_3: Whole
    span_6: Whole
    effective: list[Amount]
    temperature: list[Number | None] | None = None


@dataclass(frozen=True)
class Posterior(Row):
    """Mean attention of one layer's heads by distance, `[H, n]`, and the generalized Gaussian nearest to each.

    `beta` and `scale` are the parameters of that fit, and `divergence` is its Kullback–Leibler divergence in nats. The
    fit takes the attention within the n distances as a distribution of its own. `prior` is the scaled prior of the last
    query over the same distances; None for a model without one.
    """

    layer: Whole
    profile: Profiles = field(metadata=digits(7))
    beta: list[Number | None]
    scale: list[Number | None]
    divergence: list[Number | None]
    prior: Profiles | None = field(default=None, metadata=digits(7))

    @property
    def beyond(self) -> list[float]:
        """The share of each head's attention at distances of n and more, such as that on the first tokens."""
        return [max(0.0, 1 - sum(profile)) for profile in self.profile]

    @staticmethod
    def fits(layer: Mapping[str, Any]) -> Wrong | None:
        """All lists of a layer have its heads, and all profiles the same distances."""
        heads, distances = len(layer["profile"]), len(layer["profile"][0])
        for name in ("profile", "prior"):
            if any(len(row) != distances for row in layer.get(name, ())):
                return f".{name}", f"has rows of different lengths; {distances} numbers are needed in each"
        for name in ("beta", "scale", "divergence", "prior"):
            if name in layer and len(layer[name]) != heads:
                return f".{name}", f"has {len(layer[name])} values for {heads} heads"
        return None


@dataclass(frozen=True)
class CacheSize(Row):
    """Bytes of keys and values at a length: all, and those that the pruning cache keeps."""

    length: Tokens
    full: Tokens
    kept: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Heads(Result):
    """Heads (none for models without priors), layers, and the cache; heads are described at `lengths`."""

    model: str
    heads: list[Head]
    posteriors: Annotated[list[Posterior], at_least(1)]
    cache: list[CacheSize]
    lengths: Annotated[list[Tokens], at_least(1)]
    fingerprint: str | None = None
    train_length: Tokens | None = None

    @staticmethod
    def fits(content: Mapping[str, Any]) -> Wrong | None:
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


def run(settings: Settings, progress: Progress[Heads]) -> Heads:
    from bayesattn.evaluation.reader import load_reader
    from bayesattn.studies.heads import measure

    progress.step(f"loading {settings.model}")
    reader = load_reader(settings.model, settings.tokenizer)
    stream = reader.stream(settings.text)
    progress.step("describing priors")
    heads = measure.heads(reader)
    progress.step("measuring attention")
    posteriors = measure.posteriors(reader, stream, min(settings.tokens, reader.most_positions or settings.tokens))
    progress.step("measuring the cache")
    return Heads(
        model=settings.model,
        fingerprint=reader.fingerprint,
        train_length=reader.train_length,
        lengths=list(LENGTHS),
        heads=heads,
        posteriors=posteriors,
        cache=measure.cache_sizes(reader, stream, CACHE_LENGTHS),
    )


STUDY = Study(kind="inspect", commands={"inspect": Settings}, run=run, result=Heads, place=40)
