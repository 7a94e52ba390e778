"""Any sequence of calls of Hugging Face's interface: answers within the tolerance, and errors that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

import bayesattn as ba
from bayesattn.models.cache import BayesCacheLayer
from tests.attention.cache.sequences import (
    COPIES,
    EARLY,
    LONGEST,
    Failing,
    Tokens,
    contents,
    dense_posterior,
    draw_tokens,
    total_variation,
)

HEADS, KV_HEADS = 4, 2
TOLERANCE = 1e-3
# Content logits are at most half of this if entries are at most 1.
SPREAD = 4.0
# The layer that returns keys and values, and the one that attends; the second can take fewer tokens back.
ROLLBACKS = 12, 5
SEEDS = st.integers(0, 2**31)
# Copies of the object itself share its layers, as those of a list do.
DEEP_COPIES = [each for each in COPIES if each.__name__ != "copy"]
PRIORS: list[Callable[[], ba.Prior]] = [
    lambda: ba.GeneralizedGaussian.from_shape([1.0, 1.0, 2.0, 1.0], [1.0, 0.5, 2.0, 1.0]),
    lambda: ba.GeneralizedGaussian.from_shape([1.0, 1.0, -0.5, 0.7], [1.0, 2.0, 3.0, 0.5]),
    lambda: ba.Laplace(HEADS, [1.0, 2.0, 1.0, 2.0]) * ba.Window(HEADS, [9, 9, 20, 20]),
    lambda: ba.Window(HEADS, 12),
]

Call = Callable[[ba.BayesCache], object]
WRONG_CALLS: list[Call] = [
    lambda c: c.crop(1),
    lambda c: c.crop(-c.get_seq_length() - 1),
    lambda c: c.crop(-0.5),  # type: ignore[arg-type]
    lambda c: c.batch_repeat_interleave(0),
    lambda c: c.batch_select_indices(torch.tensor([99])),
    lambda c: c.batch_select_indices(torch.zeros(c.caches[0].batch, dtype=torch.bool)),
    lambda c: c.reorder_cache(torch.tensor([-1])),  # type: ignore[arg-type]
    lambda c: c.pad_left([1]),
    lambda c: c.update(torch.full((c.caches[0].batch, KV_HEADS, 1, 4), torch.nan).double(), torch.zeros(1), 0),
    lambda c: c.update(torch.zeros(c.caches[0].batch, 1, 1, 4), torch.zeros(c.caches[0].batch, 1, 1, 4), 0),
]


class BayesCacheCalls(RuleBasedStateMachine):
    """A cache of two layers, and a list of all keys that its sequences have had; the layers get the same tokens."""

    sequences: ClassVar[int] = 0
    answers_after_eviction: ClassVar[int] = 0
    refusals: ClassVar[int] = 0

    @initialize(
        first=st.sampled_from(PRIORS),
        second=st.sampled_from(PRIORS),
        scaled=st.booleans(),
        padding=st.sampled_from([None, [0, 7]]),
        prompt=st.sampled_from([0, 40, 100, 100]),
    )
    def start(
        self,
        first: Callable[[], ba.Prior],
        second: Callable[[], ba.Prior],
        scaled: bool,
        padding: list[int] | None,
        prompt: int,
    ) -> None:
        scale = Failing(HEADS, 0.5) if scaled else None
        common: dict[str, Any] = {"tolerance": TOLERANCE, "limits": EARLY, "content_spread": SPREAD}
        returns, attends = ROLLBACKS
        self.cache = ba.BayesCache(
            [
                ba.LayerCache(first(), same_positions=True, rollback=returns, **common),
                ba.LayerCache(second(), query_scale=scale, rollback=attends, **common),
            ]
        )
        self.forget(2)
        if padding is not None:
            self.pad_left(padding)
        if prompt:
            self.forward_plain(seed=0, number=prompt)

    def teardown(self) -> None:
        type(self).sequences += 1

    def forget(self, batch: int) -> None:
        self.batch, self.reached = batch, 0
        self.k = torch.zeros(batch, KV_HEADS, 0, 4, dtype=torch.float64)
        self.padding: Tensor | None = None

    @property
    def length(self) -> int:
        return self.k.shape[2]

    @property
    def has_evicted(self) -> bool:
        return any(store.first > 0 for cache in self.cache.caches for store in cache._state.storage.stores)

    def contents(self) -> list[Any]:
        return [contents(cache) for cache in self.cache.caches]

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The posteriors of both layers, as two attention layers of a model compute them."""
        returning = self.cache.caches[0]
        first = self.cache.get_mask_sizes(tokens.q.shape[2], 0)[1]
        k, v = self.cache.update(tokens.k, tokens.v, 0)
        assert first == returning.length - k.shape[2]
        kept = None if self.padding is None else (self.padding - first).clamp(min=0)
        assert torch.equal(k, self.with_new(tokens)[:, :, first:])
        posterior, _ = dense_posterior(tokens.q, k, returning.prior, None, True, kept)
        layer = self.cache.layers[1]
        assert isinstance(layer, BayesCacheLayer)
        return posterior[..., : k.shape[2]] @ v.repeat_interleave(HEADS // KV_HEADS, 1), layer.attend(*tokens)

    def with_new(self, tokens: Tokens) -> Tensor:
        k = tokens.k
        if self.padding is not None:
            position = torch.arange(self.length, self.length + k.shape[2])
            k = k.masked_fill((position < self.padding[:, None])[:, None, :, None], 0.0)
        return torch.cat([self.k, k], 2)

    def tokens(self, seed: int, number: int) -> Tokens:
        number = min(number, LONGEST - self.length)
        q, k, v = draw_tokens(seed, self.batch, HEADS, KV_HEADS, self.length, number, 1.0, 1.0)
        return Tokens(q.clamp(-1, 1), k.clamp(-1, 1), v)

    @precondition(lambda self: self.length < LONGEST)
    @rule(seed=SEEDS, number=st.sampled_from([1, 1, 2, 7, 30, 60]))
    def forward_plain(self, seed: int, number: int) -> None:
        tokens = self.tokens(seed, number)
        outputs = self.forward(tokens)
        self.k = self.with_new(tokens)
        self.reached = max(self.reached, self.length)
        assert self.cache.get_seq_length(0) == self.cache.get_seq_length(1) == self.length
        for cache, out in zip(self.cache.caches, outputs, strict=True):
            exact, _ = dense_posterior(tokens.q, self.k, cache.prior, cache.query_scale, True, self.padding)
            assert total_variation(out, exact) <= TOLERANCE + 1e-9
        type(self).answers_after_eviction += self.has_evicted

    @precondition(lambda self: self.length < LONGEST)
    @rule(seed=SEEDS, number=st.sampled_from([1, 30]), error=st.sampled_from([ValueError("no"), KeyboardInterrupt()]))
    def forward_that_fails_in_the_second_layer(self, seed: int, number: int, error: BaseException) -> None:
        before, tokens = self.contents(), self.tokens(seed, number)
        scale = self.cache.caches[1].query_scale
        if isinstance(scale, Failing):
            scale.error = error
        else:
            tokens = tokens._replace(q=torch.full_like(tokens.q, torch.nan))
            if self.padding is not None and self.length < self.padding.max():
                return  # padding may hold anything
        with pytest.raises((ValueError, KeyboardInterrupt)), self.cache.unchanged_on_error():
            self.forward(tokens)
        assert self.contents() == before
        if isinstance(scale, Failing):
            scale.error = None

    @rule(back=st.integers(0, 2 * max(ROLLBACKS)))
    def crop(self, back: int) -> None:
        length, before = max(0, self.length - back), self.contents()
        try:
            self.cache.crop(length - self.length)
        except ValueError:
            assert self.has_evicted
            assert length < self.reached - min(ROLLBACKS)
            assert self.contents() == before
            type(self).refusals += 1
            return
        self.k = self.k[:, :, :length]

    def choose(self, index: Tensor) -> None:
        self.k, self.batch = self.k[index], len(index)
        self.padding = None if self.padding is None else self.padding[index]

    @precondition(lambda self: self.length > 0 and self.batch < 4)
    @rule(repeats=st.integers(1, 2))
    def batch_repeat_interleave(self, repeats: int) -> None:
        self.cache.batch_repeat_interleave(repeats)
        self.choose(torch.arange(self.batch).repeat_interleave(repeats))

    @precondition(lambda self: self.length > 0)
    @rule(index=st.lists(st.integers(0, 2**20), min_size=1, max_size=3), as_mask=st.booleans(), negative=st.booleans())
    def batch_select_indices(self, index: list[int], as_mask: bool, negative: bool) -> None:
        chosen = torch.tensor(index) % self.batch - (self.batch if negative else 0)
        if as_mask:
            chosen = torch.zeros(self.batch, dtype=torch.bool).index_fill(0, chosen % self.batch, True)
        self.cache.batch_select_indices(chosen)
        self.choose(torch.arange(self.batch)[chosen])

    @precondition(lambda self: self.length > 0)
    @rule(index=st.lists(st.integers(0, 2**20), min_size=1, max_size=3))
    def reorder_cache(self, index: list[int]) -> None:
        chosen = torch.tensor(index) % self.batch
        self.cache.reorder_cache(chosen)  # type: ignore[arg-type]
        self.choose(chosen)

    @precondition(lambda self: self.length == 0)
    @rule(padding=st.lists(st.sampled_from([0, 0, 1, 5, 40]), min_size=1, max_size=3))
    def pad_left(self, padding: list[int]) -> None:
        self.cache.pad_left(padding)
        self.forget(len(padding))
        self.padding = torch.tensor(padding)

    @rule(batch=st.integers(1, 3), seldom=st.integers(0, 5))
    def reset(self, batch: int, seldom: int) -> None:
        if seldom == 0:
            self.cache.reset()
            assert self.cache.get_seq_length() == 0
            self.forget(batch)

    @rule(copy_of=st.sampled_from(DEEP_COPIES), seed=SEEDS)
    def go_on_with_a_copy(self, copy_of: Callable[[ba.BayesCache], ba.BayesCache], seed: int) -> None:
        original, before = self.cache, self.contents()
        self.cache = copy_of(original)
        assert self.contents() == before
        if self.length < LONGEST:
            self.forward_plain(seed, 3)
        assert [contents(cache) for cache in original.caches] == before

    @precondition(lambda self: self.length > 0)
    @rule(call=st.sampled_from(WRONG_CALLS))
    def call_wrongly(self, call: Call) -> None:
        before = self.contents()
        with pytest.raises((TypeError, ValueError)) as caught:
            call(self.cache)
        assert self.contents() == before
        assert len(str(caught.value)) <= 300


def run(examples: int, steps: int, tried: Callable[[str, int], None]) -> None:
    names = ["sequences", "answers_after_eviction", "refusals"]
    for name in names:
        setattr(BayesCacheCalls, name, 0)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        BayesCacheCalls,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    for name in names:
        tried(f"cache {name.replace('_', ' ')}", getattr(BayesCacheCalls, name))
    assert BayesCacheCalls.sequences >= examples
    assert BayesCacheCalls.answers_after_eviction > examples
    assert BayesCacheCalls.refusals > 0


def test_any_sequence_of_calls_is_answered_right_or_refused(tried: Callable[[str, int], None]) -> None:
    run(25, 25, tried)


@pytest.mark.slow
def test_many_long_sequences_of_calls_are_answered_right_or_refused(tried: Callable[[str, int], None]) -> None:
    run(500, 50, tried)
