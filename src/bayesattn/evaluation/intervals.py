"""Confidence intervals of shares and means."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def wilson(right: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share, after `right` of `trials` were right; (0, 1) without trials.

    For scores from 0 to 1, give their sum as `right`. Such scores vary less than right and wrong answers do, so the
    interval is wider than necessary.
    """
    if not 0 <= right <= trials:
        raise ValueError(f"{right} of {trials} trials are right; a number from 0 to {trials} is needed")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = right / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(right: float, trials: int, other_right: float, other_trials: int) -> tuple[float, float]:
    """95% interval of the difference of two shares, from Wilson's interval of each (Newcombe's method 10)."""
    p, q = right / trials, other_right / other_trials
    (p_low, p_high), (q_low, q_high) = wilson(right, trials), wilson(other_right, other_trials)
    return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def half_interval(samples: NDArray[np.float64]) -> float:
    """Half the width of the 95% interval of a mean, by Student's t, because there may be few samples."""
    return float(student(len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples)))


@cache
def student(freedom: int, share: float = 0.95) -> float:
    """The t within which this share of Student's distribution lies, for whole degrees of freedom.

    The share within ±t is a finite sum over powers of cos θ, where tan θ = t / √freedom (Abramowitz and Stegun, 26.7.3
    and 26.7.4). It grows with θ, so bisection finds θ.
    """
    import numpy as np

    odd, terms = freedom % 2, freedom // 2
    even_numbers = 2.0 * np.arange(1, max(1, terms))
    factors = np.cumprod([1.0, *((even_numbers - 1 + odd) / (even_numbers + odd))])[:terms]
    powers = 2.0 * np.arange(terms) + odd

    def within(angle: float) -> float:
        total = math.sin(angle) * float((factors * math.cos(angle) ** powers).sum())
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
