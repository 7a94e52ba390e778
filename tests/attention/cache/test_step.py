"""A prepared step answers as the general way does, leaves the same state, and declines what it is not prepared for."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.attention.cache import step as step_module
from bayesattn.attention.cache.layer_cache import unchanged_on_error
from bayesattn.attention.cache.step import Step
from tests.attention.cache.sequences import EARLY, contents

HEADS, SIZE, START, N = 4, 8, 60, 120


class Taken:
    """How many tokens steps took and declined."""

    def __init__(self) -> None:
        self.taken = self.declined = 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Taken:
    counts, attend = Taken(), Step.attend

    def counted(*arguments: Any) -> Any:
        result = attend(*arguments)
        counts.taken += result is not None
        counts.declined += result is None
        return result

    monkeypatch.setattr(Step, "attend", counted)
    return counts


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of numpy
        yield


def draw(batch: int = 1, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, N, SIZE).to(dtype)
    k, v = torch.randn(2, batch, kv_heads, N, SIZE).to(dtype)
    return q, k, v


def read(cache: ba.LayerCache, x: tuple[Tensor, ...], start: int, stop: int) -> Tensor:
    return cache.attend(*(each[:, :, start:stop] for each in x))


def read_generally(cache: ba.LayerCache, x: tuple[Tensor, ...], start: int, stop: int) -> Tensor:
    cache._state.step = None
    return read(cache, x, start, stop)


PRIORS: dict[str, Callable[[], ba.Prior]] = {
    "local": lambda: ba.Laplace(HEADS, [2.0, 1.5, 1.0, 0.7]),
    "local and retrieving": lambda: ba.GeneralizedGaussian.from_shape([1.0, -0.5, 1.0, -0.5], [0.5, 8.0, 0.6, 8.0]),
    "windows": lambda: ba.Uniform(HEADS) * ba.Window(HEADS, [9, 9, 40, 100]),
    "flat": lambda: ba.Uniform(HEADS),
}
SCALES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "learned": lambda: ba.ScalableSoftmax(HEADS, 0.4),
    "some": lambda: ba.ScalableSoftmax(HEADS, 0.4, [True, False, True, False]),
    "Llama 4": lambda: ba.Llama4Scaling(HEADS, length=16),
}


KINDS = [
    (1, 4, torch.float32, None),
    (1, 2, torch.float32, 9.0),
    (3, 2, torch.float64, None),
    (2, 1, torch.float32, 30.0),
]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("scale", "scale_prior"),
    [("none", True), ("learned", True), ("learned", False), ("some", True), ("Llama 4", False)],
)
@pytest.mark.parametrize(("batch", "kv_heads", "dtype", "spread"), KINDS)
@pytest.mark.parametrize("block", [1, 7])
def test_a_step_is_what_the_general_way_does(
    prior: str, scale: str, scale_prior: bool, batch: int, kv_heads: int, dtype: torch.dtype,
    spread: float | None, block: int, steps: Taken, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(step_module, "BLOCK", block)
    x = draw(batch, kv_heads, dtype)
    cache = ba.LayerCache(
        PRIORS[prior](), query_scale=SCALES[scale](), scale_prior=scale_prior, content_spread=spread, rollback=4,
        tolerance=1e-3, limits=EARLY,
    )  # fmt: skip
    read(cache, x, 0, START)
    other = copy.deepcopy(cache)
    exact = ba.bayesian_attention(
        *x, cache.prior, query_scale=cache.query_scale, scale_prior=scale_prior, implementation="reference"
    )  # fmt: skip
    for start in range(START, N):
        out, expected = read(cache, x, start, start + 1), read_generally(other, x, start, start + 1)
        assert cache._state.compared_at == other._state.compared_at
        if block == 1:  # every token is looked at by itself
            assert torch.equal(out, expected)
            assert contents(cache) == contents(other)
            assert cache._state.largest_value == other._state.largest_value
        wanted = exact[:, :, start : start + 1]
        assert ((out - wanted).norm(dim=-1) <= 2e-3 * x[2].norm(dim=-1).max()).all()
    assert steps.taken > (N - START) / 2
    known, expected_known = cache._state.certificate, other._state.certificate
    assert known is not None
    assert expected_known is not None
    torch.testing.assert_close(known.key_norm, expected_known.key_norm, rtol=1e-3, atol=0)
    assert (1 - 1e-3) * expected_known.largest_spread <= known.largest_spread <= 1.3 * expected_known.largest_spread
    assert cache._state.largest_value >= x[2].abs().max()


def test_a_block_is_noted_at_once_and_never_as_less(steps: Taken) -> None:
    x, limits = draw(), ba.attention.cache.spans.SpanLimits(least_kept=90)
    cache = ba.LayerCache(ba.Laplace(HEADS, [2.0, 1.5, 1.0, 0.7]), limits=limits)
    other = copy.deepcopy(cache)
    for each in (cache, other):
        read(each, x, 0, START)
        read(each, x, START, START + 1)
    for start in range(START + 1, START + 20):
        read(cache, x, start, start + 1)
    assert cache._state.pending is not None
    assert cache._state.settled is not None
    before = cache._state.settled.key_norm.clone()
    read(other, x, START + 1, START + 20)
    assert torch.equal(cache._state.settled.key_norm, before)  # no note is taken yet
    known, expected = cache._state.certificate, other._state.certificate
    assert known is not None
    assert expected is not None
    assert cache._state.pending is None
    # Never less, and not much more than without rounding.
    for given, wanted in ((known.key_norm, expected.key_norm), (known.largest_spread, expected.largest_spread)):
        given, wanted = torch.as_tensor(given).double(), torch.as_tensor(wanted).double()
        assert (given >= wanted * (1 - 1e-6)).all()
        assert (given <= wanted * (1 + 1e-4)).all()
    known.key_norm, known.largest_spread = expected.key_norm, expected.largest_spread
    assert contents(cache) == contents(other)


@pytest.mark.parametrize("due", ["first plan", "longer plan", "eviction", "split"])
def test_a_block_ends_when_something_else_is_due(due: str, steps: Taken) -> None:
    x = draw()
    limits = ba.attention.cache.spans.SpanLimits(
        least_kept=90 if due == "first plan" else 24, least_freed=8 if due == "split" else 10**6,
        horizon=128 if due == "longer plan" else 512,
    )  # fmt: skip
    slopes = {"eviction": [0.5] * 4, "split": [0.5, 0.5, 0.01, 0.01]}.get(due, [0.01] * 4)
    cache = ba.LayerCache(ba.Laplace(HEADS, slopes), limits=limits, content_spread=20.0, rollback=4)
    read(cache, x, 0, 30)
    other = copy.deepcopy(cache)
    for start in range(30, N):
        read(cache, x, start, start + 1)
        read_generally(other, x, start, start + 1)
        states = cache._state, other._state
        plans = [(s.storage.first, len(s.storage.stores), s.settled and s.settled.planned_length) for s in states]
        assert plans[0] == plans[1]
    assert steps.taken > 70


def test_heads_in_several_stores_take_steps(steps: Taken) -> None:
    x = draw(kv_heads=4)
    cache = ba.LayerCache(ba.Laplace(HEADS, [0.02, 2.0, 0.02, 2.0]), content_spread=9.0, limits=EARLY)
    read(cache, x, 0, START)
    for start in range(START, N):
        out = read(cache, x, start, start + 1)
    assert len(cache._state.storage.stores) == 2
    assert cache._state.storage.order is not None  # neighbours are in different stores
    assert cache._state.step is not None
    assert len(cache._state.step.parts) == 2
    exact = ba.bayesian_attention(*x, cache.prior, implementation="reference")[:, :, -1:]
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=0)


def test_a_store_that_splits_twice_returns_heads_in_their_order(steps: Taken) -> None:
    x = draw(kv_heads=4)
    limits = ba.attention.cache.spans.SpanLimits(least_kept=8, least_freed=8, horizon=512)
    cache = ba.LayerCache(ba.Uniform(HEADS) * ba.Window(HEADS, [60, 4, 10**6, 30]), rollback=0, limits=limits)
    other, numbers = copy.deepcopy(cache), []
    for each in (cache, other):
        read(each, x, 0, 6)
    for start in range(6, N):
        out = read(cache, x, start, start + 1)
        torch.testing.assert_close(out, read_generally(other, x, start, start + 1), atol=1e-6, rtol=0)
        numbers.append(len(cache._state.storage.stores))
    assert {*numbers} == {1, 2, 3, 4}
    assert steps.taken > 100


SINKS: dict[str, Tensor] = {"plain": torch.zeros(HEADS, 3), "favoured": torch.linspace(-1, 2, 3 * HEADS).view(HEADS, 3)}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize(("scale", "scale_prior"), [("none", True), ("learned", True), ("learned", False)])
@pytest.mark.parametrize(("batch", "kv_heads", "dtype", "spread"), KINDS)
def test_a_step_with_sinks_is_what_the_general_way_does(
    prior: str, sinks: str, scale: str, scale_prior: bool, batch: int, kv_heads: int, dtype: torch.dtype,
    spread: float | None, steps: Taken,
) -> None:  # fmt: skip
    x = draw(batch, kv_heads, dtype)
    with_sinks = ba.Sinks(PRIORS[prior](), 3)
    with torch.no_grad():
        with_sinks.log_prior.copy_(SINKS[sinks])
    cache = ba.LayerCache(
        with_sinks.to(dtype), query_scale=SCALES[scale](), scale_prior=scale_prior, rollback=4,
        content_spread=None if spread is None else 30.0, tolerance=1e-3, limits=EARLY,
    )  # fmt: skip
    other = copy.deepcopy(cache)
    exact = ba.bayesian_attention(
        *x, cache.prior, query_scale=cache.query_scale, scale_prior=scale_prior, implementation="reference"
    )  # fmt: skip
    close = {"atol": 1e-5, "rtol": 0.0}
    for start in range(N):  # from the first token on, when no query sees all sinks
        out, expected = read(cache, x, start, start + 1), read_generally(other, x, start, start + 1)
        torch.testing.assert_close(out, expected, **close)
        assert cache._state.storage.first == other._state.storage.first
        wanted = exact[:, :, start : start + 1]
        assert ((out - wanted).norm(dim=-1) <= 2e-3 * x[2].norm(dim=-1).max()).all()
    assert steps.taken > N / 2


def test_sinks_may_be_taken_back_and_come_again(steps: Taken) -> None:
    cache = ba.LayerCache(ba.Sinks(ba.Laplace(HEADS, [2.0, 1.5, 1.0, 0.7]), 3), rollback=N)
    for _ in range(2):
        x = draw()
        exact = ba.bayesian_attention(*x, cache.prior, implementation="reference")
        for start in range(cache.length, N):
            out = read(cache, x, start, start + 1)
            torch.testing.assert_close(out, exact[:, :, start : start + 1], atol=1e-5, rtol=0)
        cache.crop(0)
    assert steps.taken > 1.9 * N


def test_large_keys_and_small_queries_are_finite_with_sinks(steps: Taken) -> None:
    cache = ba.LayerCache(ba.Sinks(ba.Laplace(4, [0.5] * 4), 2), softmax_scale=1e30)
    for position in range(9):
        q, k, v = torch.randn(3, 1, 4, 1, 8)
        out = cache.attend(q * 0, k if position == 0 else k * 1e9, v)
        assert out.isfinite().all()
    assert steps.taken >= 6


def stepping(steps: Taken, **settings: Any) -> tuple[ba.LayerCache, tuple[Tensor, ...]]:
    """A cache whose last token was a step, and tokens to go on with."""
    x = draw()
    settings = {"query_scale": ba.ScalableSoftmax(HEADS, 0.4), "limits": EARLY, "rollback": 8, **settings}
    cache = ba.LayerCache(ba.Laplace(HEADS, [2.0, 1.5, 1.0, 0.7]), **settings)
    read(cache, x, 0, START)
    for start in range(START, START + 4):
        read(cache, x, start, start + 1)
    assert steps.taken == 3
    return cache, x


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20, 1e30])
def test_numbers_out_of_bounds_are_declined_before_anything_changes(which: int, value: float, steps: Taken) -> None:
    cache, x = stepping(steps)
    other, before = copy.deepcopy(cache), contents(cache)
    new = [each[:, :, START + 4 : START + 5].clone() for each in x]
    new[which][0, 1, 0, 2] = value
    answers = []
    for each, step in ((cache, cache._state.step), (other, None)):
        each._state.step = step
        try:
            answers.append((each.attend(*new), contents(each)))
        except ValueError as error:
            answers.append((str(error), contents(each)))
            assert contents(each) == before
    assert answers[0][1] == answers[1][1]
    if isinstance(answers[0][0], Tensor):
        assert torch.equal(answers[0][0], answers[1][0])
    else:
        assert answers[0][0] == answers[1][0]


def test_a_query_that_needs_evicted_keys_is_refused(steps: Taken) -> None:
    cache, x = stepping(steps)
    for start in range(START + 4, 100):
        read(cache, x, start, start + 1)
    assert cache.first > 0
    before, declined = contents(cache), steps.declined
    q, k, v = (each[:, :, 100:101] for each in x)
    with pytest.raises(ValueError, match="which are evicted"):
        cache.attend(1e4 * q, k, v)
    assert steps.declined == declined + 1
    assert contents(cache) == before
    other = copy.deepcopy(cache)
    assert torch.equal(read(cache, x, 100, 101), read_generally(other, x, 100, 101))


@pytest.mark.parametrize("place", ["sdpa", "evict"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_an_error_in_the_middle_of_a_step_changes_nothing(
    place: str, error: BaseException, steps: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, x = stepping(steps)
    other, before = copy.deepcopy(cache), contents(cache)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        if place == "sdpa":
            patch.setattr(step_module, "scaled_dot_product_attention", fail)
        else:
            patch.setattr(step_module.State, "evict", fail)
        with pytest.raises(type(error)):
            read(cache, x, START + 4, START + 5)
    assert contents(cache) == before
    assert torch.equal(read(cache, x, START + 4, START + 5), read_generally(other, x, START + 4, START + 5))


def test_what_a_block_restores_is_not_overwritten_by_steps(steps: Taken) -> None:
    cache, x = stepping(steps)
    before = contents(cache)

    def take_back_and_fail() -> None:
        with unchanged_on_error([cache]):
            cache.crop(START + 1)
            for start in range(N - 8, N):
                read(cache, x, start, start + 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_back_and_fail()
    assert contents(cache) == before


def test_a_step_goes_on_after_tokens_are_taken_back(steps: Taken) -> None:
    cache, x = stepping(steps)
    first = [read(cache, x, start, start + 1) for start in range(START + 4, START + 8)]
    cache.crop(START + 4)
    again = [read(cache, x, start, start + 1) for start in range(START + 4, START + 8)]
    for out, other in zip(first, again, strict=True):  # there is one key less, of no weight
        torch.testing.assert_close(out, other)
    assert (steps.taken, steps.declined) == (11, 0)


def test_a_step_declines_positions_before_its_first_query_scale(steps: Taken) -> None:
    cache, x = stepping(steps, rollback=20)
    assert cache._state.step is not None
    other = ba.LayerCache(cache.prior, query_scale=cache.query_scale, limits=EARLY, rollback=20)
    read(other, x, 0, 80)  # more than queries that take a scale from the table, which begins after these
    read(other, x, 80, 81)
    other.crop(70)
    out, declined = read(other, x, 70, 71), steps.declined
    exact = ba.bayesian_attention(
        *(each[:, :, :71] for each in x), cache.prior, query_scale=cache.query_scale, implementation="reference"
    )
    assert declined == 1
    torch.testing.assert_close(out, exact[:, :, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["grad", "inference", "autocast", "leaf"])
def test_modes_make_no_difference(mode: str, steps: Taken) -> None:
    cache, x = stepping(steps)
    new = [each[:, :, START + 4 : START + 5] for each in x]
    expected = copy.deepcopy(cache).attend(*new)
    if mode == "leaf":
        new = [each.clone().requires_grad_() for each in new]
    with torch.inference_mode(mode == "inference"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        out = cache.attend(*new)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    assert not out.is_inference()


def test_transforms_of_torch_go_the_general_way(steps: Taken) -> None:
    cache, x = stepping(steps)
    assert cache._state.step is not None
    new = [each[:, :, START + 4 : START + 5] for each in x]
    inside = []
    torch.func.vjp(lambda q: inside.append(cache._state.step.arrays_of(q, *new[1:])) or q, new[0])  # type: ignore[union-attr,func-returns-value]
    assert inside == [None]


class Named(Tensor):
    """A tensor of another type."""


def test_other_tensors_go_the_general_way(steps: Taken) -> None:
    cache, x = stepping(steps)
    new = [each[:, :, START + 4 : START + 5] for each in x]
    expected, taken = copy.deepcopy(cache).attend(*new), steps.taken
    out = cache.attend(*(each.as_subclass(Named) for each in new))
    torch.testing.assert_close(out.as_subclass(Tensor), expected)
    assert steps.taken == taken


def test_a_token_in_other_memory_is_the_same(steps: Taken) -> None:
    cache, x = stepping(steps)
    new = [each[:, :, START + 4 : START + 5] for each in x]
    expected = copy.deepcopy(cache).attend(*new)
    odd = [torch.stack([each, each], -1)[..., 0] for each in new]  # of stride 2
    assert torch.equal(cache.attend(*odd), expected)


@pytest.mark.parametrize("change", ["prior", "scale", "position"])
def test_what_no_longer_fits_is_noticed_in_a_step(change: str, steps: Taken) -> None:
    cache, x = stepping(steps)
    before = contents(cache)
    new = [each[:, :, START + 4 : START + 5] for each in x]
    if change == "prior":
        cache.prior = copy.deepcopy(cache.prior)
    elif change == "scale":
        cache.query_scale = None
    with pytest.raises(ValueError, match="must follow those" if change == "position" else "changed since the cache"):
        cache.attend(*new, position=3 if change == "position" else None)
    assert contents(cache) == before


def test_parameters_for_a_prior_that_takes_none_are_refused_in_a_step(steps: Taken) -> None:
    cache, x = stepping(steps)
    with pytest.raises(TypeError, match="takes no parameters"):
        cache.attend(*(each[:, :, START + 4 : START + 5] for each in x), torch.zeros(1))


def test_what_steps_returned_is_not_overwritten(steps: Taken) -> None:
    cache, x = stepping(steps)
    out = read(cache, x, START + 4, START + 5)
    kept = out.clone()
    for start in range(START + 5, START + 9):
        read(cache, x, start, start + 1)
    assert torch.equal(out, kept)


def test_a_cache_that_was_reset_holds_no_memory_of_a_step(steps: Taken) -> None:
    cache, _ = stepping(steps)
    cache.reset()
    assert cache._state.step is None
    assert cache.bytes == 0
