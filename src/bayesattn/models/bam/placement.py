"""Where heads start: `prior_init: reader` puts retrieval into the last layer, for any number of layers and heads."""

from __future__ import annotations

# [beta, scale in tokens] of a head.
Head = list[float]


def reader_heads(num_heads: int, *, retrieves: bool) -> list[Head]:
    """The heads of one layer.

    Local heads have β = 1, with scales from 1 to 4 tokens, or from 2 to 4 in a layer that retrieves. There, the second
    half of the heads prefers distant tokens: β = −0.5 and −1 in turns.
    """
    if not retrieves:
        return _local(num_heads, narrowest=1.0)
    local = num_heads - num_heads // 2
    return [*_local(local, narrowest=2.0), *([-0.5 if n % 2 == 0 else -1.0, 1.0] for n in range(num_heads - local))]


def _local(num_heads: int, narrowest: float, widest: float = 4.0) -> list[Head]:
    """Scales in equal ratios."""
    steps = max(1, num_heads - 1)
    return [[1.0, narrowest * (widest / narrowest) ** (n / steps)] for n in range(num_heads)]
