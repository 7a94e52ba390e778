"""The figures of the blog that made the popular estimate known, beside exact ones."""

from __future__ import annotations

import math

from bayesattn.compute.architecture import Architecture
from bayesattn.compute.costs import BlogShare, Gradual
from bayesattn.compute.flops import training_flops
from bayesattn.compute.savings import savings
from bayesattn.compute.schedule import Stage, parse

# Schedules whose long share the blog gives.
SCHEDULES = ("15T@8K,100B@128K", "15T@8K,100B@1M", "15T@2K,100B@1M")
# Its long training: tokens of a batch and of all, and contexts from the longest down to the shortest.
BATCH, TOKENS, SHORTEST = 16e6, 800e9, 8000
LONGEST = (128_000, 1_000_000)
# Tokens of the stage that it compares with, and the training before.
STAGE, BEFORE = 100e9, Stage(15e12, 8192, 8000.0)


def shares(architecture: Architecture) -> list[BlogShare]:
    """The long share of each schedule."""
    counted = [(schedule, savings(architecture, parse(schedule))) for schedule in SCHEDULES]
    return [BlogShare(schedule, each.blog, each.dropped) for schedule, each in counted]


def gradual(architecture: Architecture) -> list[Gradual]:
    """Its long training: up to 128K, up to 1M with the same tokens, and with more in proportion to log-length."""
    more = TOKENS * math.log(LONGEST[1] / SHORTEST) / math.log(LONGEST[0] / SHORTEST)
    schedules = [(TOKENS, LONGEST[0]), (TOKENS, LONGEST[1]), (more, LONGEST[1])]
    return [_gradual(architecture, tokens, longest) for tokens, longest in schedules]


def _gradual(architecture: Architecture, tokens: float, longest: int) -> Gradual:
    """Batches of equal tokens, whose contexts fall geometrically; the shortest itself is left out."""
    batches = int(tokens / BATCH)
    tokens = batches * BATCH
    ratio = (SHORTEST / longest) ** (1 / batches)
    lengths = [longest * ratio**number for number in range(batches)]
    mean = math.fsum(lengths) / batches
    by_square = BATCH * math.fsum(length**2 for length in lengths)
    # Exact FLOPs are linear in the length, so that those of the mean are the mean of those.
    exact = training_flops(architecture, tokens, round(mean))
    before_by_square = BEFORE.tokens * BEFORE.decimal_length**2
    before = training_flops(architecture, BEFORE.tokens, BEFORE.length)
    return Gradual(
        tokens=tokens,
        longest=longest,
        shortest=SHORTEST,
        same_cost=math.sqrt(by_square / STAGE),
        mean=mean,
        share_blog=by_square / (by_square + before_by_square),
        share=exact / (exact + before),
    )
