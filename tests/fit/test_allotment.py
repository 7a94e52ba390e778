from __future__ import annotations

import itertools
from random import Random

import pytest
import torch

import bayesattn as ba
from bayesattn.adapt.cache import layer_cache
from bayesattn.fit.allotment import ALL, allot, positions_held
from tests.bad_inputs.rows import check_refused

LENGTH, SINKS = 2048, 4
WIDTHS = [32, 128, 512]


def made_up(layers: int, heads: int, seed: int = 0) -> dict[tuple[int, int], list[float]]:
    random = Random(seed)
    sizes = {(layer, head): random.random() ** 4 for layer in range(layers) for head in range(heads)}
    return {key: [size, size * random.random(), size * random.random() * 0.1] for key, size in sizes.items()}


def held(widths: dict[tuple[int, int], int]) -> int:
    layers = {layer for layer, _ in widths}
    return sum(
        positions_held(tuple(sorted(w for (number, _), w in widths.items() if number == layer)), LENGTH, SINKS)
        for layer in layers
    )


@pytest.mark.parametrize("widths", [(32, 32, 32), (32, 64, ALL), (512, 512, 768), (ALL, ALL, ALL), (900, 900, 900)])
def test_positions_are_those_that_the_cache_of_a_model_holds(widths: tuple[int, ...]) -> None:
    windows = ba.Sinks(ba.Window(6, [w for w in widths for _ in range(2)]), SINKS)
    cache = layer_cache(ba.Uniform(6) if min(widths) == ALL else windows)
    q, k, v = torch.randn(1, 6, LENGTH, 8), torch.randn(1, 3, LENGTH, 8), torch.randn(1, 3, LENGTH, 8)
    cache.attend(q, k, v)
    assert cache.bytes == 2 * 8 * 4 * positions_held(widths, LENGTH, SINKS)


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_the_cache_holds_what_is_allowed_and_hardly_less(keep: float, heads: int) -> None:
    prices = made_up(8, heads)
    chosen = allot(prices, WIDTHS, LENGTH, SINKS, keep)
    share = held(chosen) / (LENGTH * len(prices))
    assert chosen.keys() == prices.keys()
    assert 0.85 * keep < share <= keep


def test_no_other_choice_is_better_by_more_than_one_layer_is_worth() -> None:
    """Against all choices for three layers. The Lagrangian's is best for the memory that it takes itself."""
    prices = made_up(3, 2, seed=3)
    choices = [*WIDTHS, ALL]

    def price(widths: tuple[int, ...]) -> float:
        pairs = zip(sorted(prices), widths, strict=True)
        return sum(0.0 if width == ALL else prices[head][WIDTHS.index(width)] for head, width in pairs)

    every = [
        (price(widths), held(dict(zip(sorted(prices), widths, strict=True))))
        for widths in itertools.product(choices, repeat=6)
    ]
    for keep in (0.15, 0.3, 0.6):
        chosen = allot(prices, WIDTHS, LENGTH, SINKS, keep)
        got = price(tuple(chosen[head] for head in sorted(prices)))
        best = min(cost for cost, positions in every if positions <= keep * LENGTH * 6)
        assert got <= best + max(max(row) for row in prices.values())
        assert got <= 1.5 * best + 1e-9


def test_heads_that_cost_nothing_get_the_narrowest_window_and_those_that_cost_much_keep_everything() -> None:
    prices = {(layer, 0): [1.0, 1.0, 1.0] if layer == 2 else [0.0, 0.0, 0.0] for layer in range(4)}
    chosen = allot(prices, WIDTHS, LENGTH, SINKS, 0.4)
    assert chosen[2, 0] == ALL
    assert all(chosen[layer, 0] < LENGTH for layer in (0, 1, 3))


def test_more_memory_never_costs_more() -> None:
    prices = made_up(6, 3, seed=1)

    def cost(keep: float) -> float:
        chosen = allot(prices, WIDTHS, LENGTH, SINKS, keep)
        return sum(0.0 if w == ALL else min(prices[head][: WIDTHS.index(w) + 1]) for head, w in chosen.items())

    costs = [cost(keep) for keep in (0.1, 0.2, 0.35, 0.5, 0.7)]
    assert costs == sorted(costs, reverse=True)


def test_less_than_the_narrowest_windows_take_is_refused_with_the_smallest_share() -> None:
    prices = made_up(3, 2)
    smallest = positions_held((32, 32), LENGTH, SINKS) / LENGTH / 2
    check_refused(lambda: allot(prices, WIDTHS, LENGTH, SINKS, smallest * 0.9), f"takes {smallest:.2%}")
    assert set(allot(prices, WIDTHS, LENGTH, SINKS, smallest * 1.001).values()) == {32}


def test_prices_beyond_all_others_do_not_lift_the_share() -> None:
    prices = made_up(4, 2) | {(0, head): [torch.inf, torch.inf, 1e38] for head in range(2)}
    keep = 0.3
    assert held(allot(prices, WIDTHS, LENGTH, SINKS, keep)) <= keep * LENGTH * len(prices)
