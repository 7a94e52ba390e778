"""Which window each key/value head gets: those that change the model least for the memory that the cache may take.

Prices add up over heads, and positions over layers, so a Lagrangian finds good windows: for a price λ of a position,
each layer takes the windows with the least price + λ · positions. λ is what makes the positions fit. Heads of one
layer share storage in which each keeps the longest window, so a layer has two different windows at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from bayesattn.adapt.cache import layer_cache
from bayesattn.errors import UserError
from bayesattn.priors import Sinks, Uniform, Window
from bayesattn.priors.window import WIDEST

# A key/value head: the number of its layer, and its own.
Head = tuple[int, int]
# The width of a head that keeps all of its keys.
ALL = WIDEST
# Steps of the search for λ.
STEPS = 60


class Option(NamedTuple):
    """Windows for the heads of a layer: what they change, the positions that they hold, and their widths."""

    price: float
    positions: int
    widths: tuple[int, ...]


@cache
def positions_held(widths: tuple[int, ...], length: int, sinks: int) -> int:
    """Positions that the cache of a layer with these windows holds after `length` tokens, over its key/value heads.

    Its spare room counts, and its sinks, which a layer that keeps everything does not have. It is tried with a cache
    whose keys are one number each.
    """
    heads = len(widths)
    prior = Uniform(heads) if min(widths) == ALL else Sinks(Window(heads, widths), sinks)
    kept = layer_cache(prior, content_spread=0.0)
    keys = torch.zeros(1, len(widths), length, 1)
    kept.attend(keys[:, :, :0], keys, keys)
    return kept.bytes // (2 * keys.element_size())


def allot(
    prices: Mapping[Head, Sequence[float]], widths: Sequence[int], length: int, sinks: int, keep: float
) -> dict[Head, int]:
    """A width for each head, `ALL` for one that keeps everything, so that the cache holds at most the share `keep`.

    Args:
        prices: of each head, for each of the widths; keeping everything costs nothing.
        widths: in rising order, all below the length.
        length: tokens at which the share is kept.
        sinks: first positions that every head keeps.
        keep: share of the positions of a full cache.

    Raises:
        UserError: even the narrowest windows take more.
    """
    check_affordable(keep, widths[0], length, sinks)
    layers: dict[int, list[Sequence[float]]] = {}
    for head in sorted(prices):
        layers.setdefault(head[0], []).append(_falling([*prices[head], 0.0]))
    options = {layer: _options(rows, [*widths, ALL], length, sinks) for layer, rows in layers.items()}
    chosen = _cheapest(options, keep * length * len(prices))
    return {
        (layer, head): width
        for layer, option in chosen.items()
        for head, width in enumerate(option.widths)
    }  # fmt: skip


def check_affordable(keep: float, narrowest: int, length: int, sinks: int) -> None:
    """Raise an error for a share below that of the narrowest windows, which is the same for any number of heads."""
    smallest = positions_held((narrowest,), length, sinks) / length
    if keep < smallest:
        raise UserError(
            f"keep is {keep:.2%}; at {length:,} tokens the smallest cache, with windows of {narrowest}, takes "
            f"{smallest:.2%}"
        )


def _falling(prices: Sequence[float]) -> list[float]:
    """Prices of which none is above that of a narrower window, as samples of queries may have it."""
    least, result = float("inf"), []
    for price in prices:
        least = min(least, price)
        result.append(least)
    return result


def _options(rows: Sequence[Sequence[float]], widths: Sequence[int], length: int, sinks: int) -> list[Option]:
    """Every pair of windows for a layer, the wider one for the heads that gain most, for any number of these."""
    made: dict[tuple[int, ...], Option] = {}
    for narrow in range(len(widths)):
        for wide in range(narrow, len(widths)):
            by_gain = sorted(range(len(rows)), key=lambda head: rows[head][wide] - rows[head][narrow])
            for number in range(len(rows) + 1) if wide > narrow else (0,):
                steps = [narrow] * len(rows)
                for head in by_gain[:number]:
                    steps[head] = wide
                chosen = tuple(widths[step] for step in steps)
                price = sum(row[step] for row, step in zip(rows, steps, strict=True))
                positions = positions_held(tuple(sorted(chosen)), length, sinks)
                made.setdefault(chosen, Option(price, positions, chosen))
    return list(made.values())


def _cheapest(options: Mapping[int, Sequence[Option]], budget: float) -> dict[int, Option]:
    """An option for each layer, by the Lagrangian; what is left goes where it is worth most."""

    def at(multiplier: float) -> dict[int, Option]:
        return {
            layer: min(each, key=lambda option: (option.price + multiplier * option.positions, option.positions))
            for layer, each in options.items()
        }

    low, high = 1e-30, 1e30  # of λ: too many positions, and few enough
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        if _total(at(middle)) > budget:
            low = middle
        else:
            high = middle
    chosen = at(high)
    if _total(chosen) > budget:  # prices that no λ outweighs
        chosen = {layer: min(each, key=lambda option: option.positions) for layer, each in options.items()}
    while True:
        left = budget - _total(chosen)
        offers = [
            ((now.price - other.price) / max(1, other.positions - now.positions), layer, other)
            for layer, now in chosen.items()
            for other in options[layer]
            if other.positions - now.positions <= left and other.price < now.price
        ]
        if not offers:
            return chosen
        _, layer, other = max(offers)
        chosen[layer] = other


def _total(chosen: Mapping[int, Option]) -> int:
    return sum(option.positions for option in chosen.values())
