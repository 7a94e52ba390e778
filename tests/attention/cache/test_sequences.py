"""Any sequence of calls: an answer is within the tolerance of dense attention or refused; an error changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

import bayesattn as ba
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

ROLLBACK = 4
SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([1, 1, 1, 2, 7, 30])
# Entries of most content, and of content made to mislead a bound that was learned from the former.
PLAIN = st.sampled_from([0.0, 0.3, 1.0, 2.0])
ADVERSARIAL = st.sampled_from([1e-200, 30.0, 1e4, 1e20, 1e200])
COUNTS = ["sequences", "answers", "answers_after_eviction", "steps", "refusals"]
ERRORS = [ValueError("no"), MemoryError(), KeyboardInterrupt()]

LOG_PRIORS = st.sampled_from([-30.0, -1.0, 0.0, 2.0, 9.0])
SHAPES = st.tuples(st.sampled_from([-0.7, 0.5, 1.0, 1.0, 1.0, 2.0]), st.sampled_from([0.3, 1.0, 3.0]))


@st.composite
def priors(draw: st.DrawFn) -> ba.Prior | ba.Sinks:
    heads = draw(st.sampled_from([2, 4]))
    beta, scale = zip(*draw(st.lists(SHAPES, min_size=heads, max_size=heads)), strict=True)
    centre = draw(st.sampled_from([0.0, 0.0, 6.0]))
    prior: ba.Prior = ba.GeneralizedGaussian.from_shape(beta, scale, [centre] * heads)
    window = draw(st.sampled_from([None, None, 1, 9, 40]))
    prior = prior if window is None else prior * ba.Window(heads, window)
    if (count := draw(st.sampled_from([0, 0, 1, 5]))) == 0:
        return prior
    sinks = ba.Sinks(prior, count).double()
    sinks.log_prior.data.copy_(torch.tensor(draw(st.lists(LOG_PRIORS, min_size=count, max_size=count))))
    return sinks


# Calls that must be refused. Each changes good arguments of `attend`; `b` is the cache's batch.
Change = Callable[[Tokens], dict[str, Any]]
WRONG_TOKENS: list[Change] = [
    lambda t: {"q": t.q[:, :1]},
    lambda t: {"q": torch.cat([t.q, t.q], 1)},
    lambda t: {"q": torch.cat([t.q, t.q], 2)},
    lambda t: {name: x[:, (x.shape[1] + 1) // 2 :] for name, x in (("k", t.k), ("v", t.v))},
    lambda t: {"k": t.k[..., :1], "q": t.q[..., :1]},
    lambda t: {"v": t.v[..., :1]},
    lambda t: {"v": t.v[:, :, :0]},
    lambda t: {name: x.float() for name, x in t._asdict().items()},
    lambda t: {name: torch.cat([x, x]) for name, x in t._asdict().items()},
    lambda t: {name: x[:0] for name, x in t._asdict().items()},
    lambda t: {"k": t.k.masked_fill(torch.arange(t.k.shape[3]) == 3, torch.nan)},
    lambda t: {"k": t.k.masked_fill(torch.arange(t.k.shape[3]) == 3, -torch.inf)},
    lambda t: {"v": t.v.masked_fill(t.v > 0, torch.inf)},
    lambda t: {"q": torch.full_like(t.q, torch.nan)},
    lambda t: {"q": t.q.numpy()},
    lambda t: {"k": None},
    lambda t: {"position": -1},
    lambda t: {"position": 1.0},
    lambda t: {"position": LONGEST},
]


class LayerCacheCalls(RuleBasedStateMachine):
    """A cache, and a list of all keys that its sequences have had."""

    sequences: ClassVar[int] = 0
    answers: ClassVar[int] = 0
    answers_after_eviction: ClassVar[int] = 0
    steps: ClassVar[int] = 0
    refusals: ClassVar[int] = 0

    @initialize(
        prior=priors(),
        shared=st.sampled_from([1, 2]),
        scale=st.sampled_from([None, None, 0.0, 0.3, 1.0, -0.5]),
        can_fail=st.sampled_from([False, False, True]),
        size=st.sampled_from([LONGEST, LONGEST, 4]),
        scale_prior=st.booleans(),
        tolerance=st.sampled_from([0.0, 1e-3, 1e-3, 0.1]),
        spread=st.sampled_from([None, None, 0.0, 8.0]),
        same_positions=st.booleans(),
        padding=st.sampled_from([None, None, [0, 7]]),
        prompt=st.sampled_from([0, 40, 100]),
    )
    def start(
        self,
        prior: ba.Prior | ba.Sinks,
        shared: int,
        scale: float | None,
        can_fail: bool,
        size: int,
        scale_prior: bool,
        tolerance: float,
        spread: float | None,
        same_positions: bool,
        padding: list[int] | None,
        prompt: int,
    ) -> None:
        self.prior, self.scale_prior, self.tolerance = prior, scale_prior, tolerance
        self.heads, self.kv_heads = prior.num_heads, prior.num_heads // shared
        # Steps are prepared for a query scale that is known, and for keys and values of the same size.
        of_kind = Failing if can_fail else ba.ScalableSoftmax
        self.scale = None if scale is None else of_kind(self.heads, scale)
        self.size = size
        self.cache = ba.LayerCache(
            prior, query_scale=self.scale, scale_prior=scale_prior, tolerance=tolerance, content_spread=spread,
            rollback=ROLLBACK, same_positions=same_positions and isinstance(prior, ba.Prior), limits=EARLY,
        )  # fmt: skip
        self.forget(2)
        if padding is not None:
            self.pad_left(padding)
        if prompt:
            self.attend(self.tokens(0, prompt, 1.0, 1.0), 1)

    def teardown(self) -> None:
        type(self).sequences += 1

    def forget(self, batch: int) -> None:
        self.batch = batch
        self.k = torch.zeros(batch, self.kv_heads, 0, self.size, dtype=torch.float64)
        self.padding: Tensor | None = None
        self.reached = 0

    def tokens(self, seed: int, number: int, q_size: float, k_size: float) -> Tokens:
        number = min(number, LONGEST - self.length)
        q, k, v = draw_tokens(seed, self.batch, self.heads, self.kv_heads, self.length, number, q_size, k_size)
        more = self.size - k.shape[3]
        q = q * (self.size / k.shape[3]) ** 0.5  # the softmax scale is the smaller for it
        return Tokens(*(nn.functional.pad(x, (0, more)) for x in (q, k)), v)

    @property
    def length(self) -> int:
        return self.k.shape[2]

    @property
    def has_evicted(self) -> bool:
        return any(store.first > 0 for store in self.cache._state.storage.stores)

    @property
    def has_room(self) -> bool:
        return self.length < LONGEST

    def refused(self, call: Callable[[], object], *errors: type[BaseException]) -> None:
        """The call raises an error and changes nothing."""
        before = contents(self.cache)
        with pytest.raises(errors or (TypeError, ValueError)) as caught:
            call()
        assert contents(self.cache) == before
        assert len(str(caught.value)) <= 300

    def attend(self, tokens: Tokens, rows: int) -> None:
        """The answer is right, or refused for a reason."""
        before = contents(self.cache)
        q = tokens.q[:, :, tokens.q.shape[2] - rows :]
        step = self.cache._state.step
        try:
            out = self.cache.attend(q, tokens.k, tokens.v, position=self.length)
        except ValueError as error:
            refusal = str(error)
            evicted = "which are evicted" in refusal and self.has_evicted
            assert evicted or "logits may reach" in refusal or "norms that are too large" in refusal
            assert contents(self.cache) == before
            type(self).refusals += 1
            return
        self.k = torch.cat([self.k, tokens.k.nan_to_num(0.0)], 2)
        assert self.cache.length == self.length
        self.reached = max(self.reached, self.length)
        if rows:
            q = q.nan_to_num(0.0)
            exact, largest = dense_posterior(q, self.k, self.prior, self.scale, self.scale_prior, self.padding)
            assert total_variation(out, exact) <= self.tolerance + 1e-9 + 4e-15 * largest
            type(self).answers += 1
            type(self).steps += step is not None and self.cache._state.step is step
            type(self).answers_after_eviction += self.has_evicted

    @precondition(lambda self: self.has_room)
    @rule(seed=SEEDS, number=SIZES, size=PLAIN, rows=st.sampled_from([0, 1, 30, 30, 30]))
    def attend_plain(self, seed: int, number: int, size: float, rows: int) -> None:
        tokens = self.tokens(seed, number, size, size)
        self.attend(tokens, min(rows, tokens.q.shape[2]))

    @precondition(lambda self: self.has_room)
    @rule(seed=SEEDS, tokens=st.integers(2, 8), size=PLAIN)
    def attend_one_by_one(self, seed: int, tokens: int, size: float) -> None:
        for number in range(min(tokens, LONGEST - self.length)):
            self.attend(self.tokens(seed + number, 1, size, size), 1)

    @precondition(lambda self: self.has_room)
    @rule(seed=SEEDS)
    def attend_many(self, seed: int) -> None:
        tokens = self.tokens(seed, 60, 1.0, 1.0)
        self.attend(tokens, tokens.q.shape[2])

    @precondition(lambda self: self.has_room and self.length > 40)
    @rule(seed=SEEDS, number=SIZES, q_size=PLAIN | ADVERSARIAL, k_size=PLAIN | ADVERSARIAL)
    def attend_adversarial(self, seed: int, number: int, q_size: float, k_size: float) -> None:
        tokens = self.tokens(seed, number, q_size, k_size)
        self.attend(tokens, tokens.q.shape[2])

    @precondition(lambda self: self.has_room and self.padding is not None)
    @rule(seed=SEEDS, number=SIZES, value=st.sampled_from([torch.nan, torch.inf, 1e300]))
    def attend_with_anything_in_padding(self, seed: int, number: int, value: float) -> None:
        tokens = self.tokens(seed, number, 1.0, 1.0)
        assert self.padding is not None
        position = torch.arange(self.length, self.length + tokens.q.shape[2])
        hidden = (position < self.padding[:, None])[:, None, :, None]
        plain = self.k
        self.attend(Tokens(*(x.masked_fill(hidden, value) for x in tokens)), tokens.q.shape[2])
        if self.length > plain.shape[2]:
            self.k = torch.cat([plain, tokens.k], 2)

    @precondition(lambda self: self.has_room)
    @rule(seed=SEEDS)
    def attend_to_no_new_tokens(self, seed: int) -> None:
        tokens = self.tokens(seed, 0, 1.0, 1.0)
        before = contents(self.cache)
        assert self.cache.attend(*tokens).shape == (self.batch, self.heads, 0, LONGEST)
        assert contents(self.cache) == before

    @rule(back=st.integers(0, 2 * ROLLBACK))
    def crop(self, back: int) -> None:
        length = max(0, self.length - back)
        before = contents(self.cache)
        try:
            self.cache.crop(length)
        except ValueError:
            assert self.has_evicted
            assert length < self.reached - ROLLBACK
            assert contents(self.cache) == before
            return
        self.k = self.k[:, :, :length]

    @precondition(lambda self: self.length > 0)
    @rule(index=st.lists(st.integers(0, 2**20), min_size=1, max_size=3))
    def reorder(self, index: list[int]) -> None:
        chosen = torch.tensor(index) % self.batch
        self.cache.reorder(chosen)
        self.k, self.batch = self.k[chosen], len(chosen)
        self.padding = None if self.padding is None else self.padding[chosen]

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
            self.forget(batch)

    @rule(copy_of=st.sampled_from(COPIES), seed=SEEDS)
    def go_on_with_a_copy(self, copy_of: Callable[[ba.LayerCache], ba.LayerCache], seed: int) -> None:
        original, before = self.cache, contents(self.cache)
        self.cache = copy_of(original)
        assert contents(self.cache) == before
        if self.has_room:
            self.attend(self.tokens(seed, 3, 1.0, 1.0), 1)
        assert contents(original) == before
        self.prior, self.scale = self.cache.prior, self.cache.query_scale  # type: ignore[assignment]

    @precondition(lambda self: 0 < self.length < LONGEST - 1)
    @rule(seed=SEEDS, change=st.sampled_from(WRONG_TOKENS))
    def attend_to_wrong_tokens(self, seed: int, change: Change) -> None:
        tokens = self.tokens(seed, 2, 1.0, 1.0)
        if self.padding is not None and self.length < self.padding.max():
            return  # padding may hold anything
        self.refused(lambda: self.cache.attend(**{**tokens._asdict(), **change(tokens)}))

    @precondition(lambda self: self.has_room and isinstance(self.scale, Failing))
    @rule(seed=SEEDS, number=SIZES, error=st.sampled_from(ERRORS))
    def attend_with_a_query_scale_that_fails(self, seed: int, number: int, error: BaseException) -> None:
        assert isinstance(self.scale, Failing)
        self.scale.error = error
        self.refused(lambda: self.cache.attend(*self.tokens(seed, number, 1.0, 1.0)), type(error))
        self.scale.error = None

    @precondition(lambda self: 0 < self.length < LONGEST - 1)
    @rule(seed=SEEDS, through=st.sampled_from(["data", "state dict", "inference mode"]))
    def attend_with_a_prior_that_changed(self, seed: int, through: str) -> None:
        before = copy.deepcopy(self.prior.state_dict())
        changed = {name: x + 1 for name, x in before.items()}
        if through == "data":
            for name, x in self.prior.state_dict().items():
                x.data.copy_(changed[name])
        elif through == "state dict":
            self.prior.load_state_dict(changed)
        else:
            with torch.inference_mode():
                for x in self.prior.state_dict().values():
                    x.add_(1)
        self.refused(lambda: self.cache.attend(*self.tokens(seed, 2, 1.0, 1.0)))
        self.prior.load_state_dict(before)

    @rule(
        call=st.sampled_from(
            [
                lambda c: c.crop(-1),
                lambda c: c.crop(c.length + 1),
                lambda c: c.crop(True),
                lambda c: c.reorder(torch.tensor([99])),
                lambda c: c.reorder(torch.tensor([], dtype=torch.long)),
                lambda c: c.reserve(-1),
                lambda c: c.pad_left([-1]),
            ]
        )
    )
    def call_wrongly(self, call: Callable[[ba.LayerCache], object]) -> None:
        if self.batch and self.length:
            self.refused(lambda: call(self.cache))


def run(examples: int, steps: int, tried: Callable[[str, int], None]) -> None:
    for name in COUNTS:
        setattr(LayerCacheCalls, name, 0)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LayerCacheCalls,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    for name in COUNTS:
        tried(f"cache {name.replace('_', ' ')}", getattr(LayerCacheCalls, name))
    assert LayerCacheCalls.sequences >= examples
    assert LayerCacheCalls.answers_after_eviction > examples
    assert LayerCacheCalls.steps > 0
    assert LayerCacheCalls.refusals > 0


def test_any_sequence_of_calls_is_answered_right_or_refused(tried: Callable[[str, int], None]) -> None:
    run(40, 25, tried)


@pytest.mark.slow
def test_many_long_sequences_of_calls_are_answered_right_or_refused(tried: Callable[[str, int], None]) -> None:
    run(1500, 50, tried)
