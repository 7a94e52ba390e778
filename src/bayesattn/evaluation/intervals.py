"""Intervals for shares."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(right: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a share of which `right` of `trials` were seen; (0, 1) without any trial.

    Of scores between 0 and 1, `right` is the sum; they vary less than rights and wrongs, so that the interval is wider
    than it need be.
    """
    if not 0 <= right <= trials:
        raise ValueError(f"{right} right of {trials} trials; the former must be between 0 and the latter")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = right / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * (share * (1 - share) / trials + z**2 / (4 * trials**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(right: float, trials: int, other_right: float, other_trials: int) -> tuple[float, float]:
    """95% interval of the difference of two shares, made of Wilson's of each (Newcombe's tenth method)."""
    p, q = right / trials, other_right / other_trials
    (p_low, p_high), (q_low, q_high) = wilson(right, trials), wilson(other_right, other_trials)
    return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)
