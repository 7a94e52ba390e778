"""The pruning cache of one layer: keys and values without those that no later query can need.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention.cache.checks import (
    CHANGED,
    check_heads,
    check_index,
    check_keys_and_values,
    check_like_held,
    check_new_tokens,
    check_padding,
    check_position,
    check_reserve,
    check_settings,
    given_prior,
    kind_of,
)
from bayesattn.attention.cache.spans import DEFAULT_LIMITS, Certificate, SpanLimits
from bayesattn.attention.cache.state import State
from bayesattn.attention.cache.step import Step
from bayesattn.attention.cache.storage import DEFAULT_ROOM, Room, Storage
from bayesattn.attention.inputs import check_softmax_scale, check_tolerance
from bayesattn.attention.kernels.registry import without_autocast
from bayesattn.attention.problem import MOST_COUNTED
from bayesattn.errors import is_whole, shown
from bayesattn.priors.base import Prior
from bayesattn.priors.conditioned import ConditionedPrior
from bayesattn.priors.sinks import Sinks, without_sinks
from bayesattn.priors.uniform import Uniform


class LayerCache:
    """Keys and values of one attention layer, those only that a later query can need.

    `attend` takes the tokens that follow those it has, one or many. It returns the attention of their queries over all
    positions so far: what `bayesian_attention` would return for the whole sequence, up to posterior mass `tolerance`.
    If evicted keys could hold more attention than the tolerance, the call raises an error.
    After any error the cache is what it was before the call.
    A key/value head is bounded if each of its query heads has a finite span; the others keep everything. Inference
    only: no gradients.

    Args:
        prior: the prior of the layer's query heads, with `Sinks` or without. It must not change while the cache is in
            use: its parameters are compared with those at the first token, every 32 tokens while they come one by one.
            With a conditioned prior only keys that its static factor hides, such as a window, are ever evicted: a later
            query may favour any other. Sinks are the first positions after the padding of each sequence, and never
            evicted.
        query_scale: a module such as `ScalableSoftmax`, called with the number of keys each query sees, or None. Spans
            are valid for all lengths to come: a query scale that grows with length shortens them, or with
            `scale_prior=False` lengthens them. A change of its parameters is noticed as well, that of a plain function
            is not.
        scale_prior, softmax_scale: as for `bayesian_attention`.
        tolerance: in [0, 1), the posterior mass of any query that may be missing. 0 evicts only what the prior hides,
            or what has a weight of zero in float64.
        content_spread: nats, before the query scale, by which the content of any key may exceed that of the likeliest
            key; twice a bound on |σ q·k| is safe. None learns it from the queries that come, with a margin of half.
        rollback: how many tokens `crop` can take back at any time.
        same_positions: keep the same positions for all heads, as `update` needs.
        room: spare positions of the tensors, `bayesattn.attention.cache.Room(least, per_held)`: `least`, or one for
            each `per_held` positions held if that is more. Less of it takes less memory, and more time for copies.
        limits: when spans are planned.

    Settings take effect with the first token. `copy.deepcopy` is a cache of the same layer that goes on by itself.
    """

    def __init__(
        self,
        prior: Prior | ConditionedPrior | Sinks,
        *,
        query_scale: Callable[[Tensor], Tensor] | None = None,
        scale_prior: bool = True,
        softmax_scale: float | None = None,
        tolerance: float = 1e-6,
        content_spread: float | None = None,
        rollback: int = 64,
        same_positions: bool = False,
        room: Room = DEFAULT_ROOM,
        limits: SpanLimits = DEFAULT_LIMITS,
    ) -> None:
        check_settings(
            prior, query_scale, content_spread, rollback, scale_prior=scale_prior, same_positions=same_positions
        )
        check_tolerance(tolerance)
        if softmax_scale is not None:
            softmax_scale = check_softmax_scale(softmax_scale)
        if not isinstance(limits, SpanLimits):
            raise TypeError(f"limits is {shown(limits)}; SpanLimits are needed")
        if not isinstance(room, Room) or not all(is_whole(each, 1, MOST_COUNTED) for each in room):
            raise TypeError(f"room is {shown(room)}; a Room of whole numbers from 1 is needed")
        self.room = room
        self.prior, self.query_scale, self.scale_prior = prior, query_scale, scale_prior
        self.softmax_scale, self.tolerance = softmax_scale, tolerance
        self.content_spread, self.rollback, self.same_positions = content_spread, rollback, same_positions
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Back to an empty cache, for any batch."""
        self._state = State(Storage(self.same_positions, self.room))

    def pad_left(self, padding: Tensor | Sequence[int]) -> None:
        """Set how many of the first positions of each sequence are padding. It sees nothing and is not seen.

        Queries, keys and values of padding may be anything, NaN as well.
        """
        counts = check_padding(padding)
        if self.length:
            raise ValueError(f"the cache has {self.length:,} positions; padding must be set while it is empty")
        state = State(Storage(self.same_positions, self.room), reserved=self._state.reserved)
        state.set_padding(counts)
        self._state = state

    def reserve(self, length: int) -> None:
        """Expect this many positions, so that heads which keep all of them need not move as they grow."""
        check_reserve(length)
        self._state.reserved = length

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: Tensor | None = None, *, position: int | None = None
    ) -> Tensor:
        """Add tokens and return the attention of the last `q.shape[2]` of them, `[B, H, Mq, Dv]`.

        `k` and `v` are `[B, G, M, D]` of the new tokens alone; q may have fewer rows, or none. `parameters` are those
        of a conditioned prior for the queries, `prior(states)`. `position` is where the caller expects the tokens to
        start; it is checked. All must be finite (checked on the CPU), except in padding.
        """
        step = self._state.step
        if step is not None and parameters is None and (arrays := step.arrays_of(q, k, v)) is not None:
            self._check_follows(k, v, position, is_new=False)
            with _computing(k):
                taken = step.attend(self._state, arrays, self.rollback)
            if taken is not None:
                out, self._state = taken
                return out
        kind = kind_of(q, k, v)
        is_new = kind is None or kind != self._state.kind
        if is_new:
            check_new_tokens(q, k, v)
            check_heads(self.prior, k, q.shape[1])
        self._check_follows(k, v, position, is_new)
        given = given_prior(without_sinks(self.prior), parameters, q)
        if k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3])
        with _computing(k):
            state = self._started(k, v)
            token = state.append(q, k, v)
            out = state.attend(q, token, given) if q.shape[2] else q.new_zeros(*q.shape[:3], v.shape[3])
            state.evict(self.rollback)
            state.step = Step.after(state, q, k, v)
        state.kind = kind
        self._state = state
        return out

    def update(self, k: Tensor, v: Tensor, *, position: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Add tokens and return keys, values and the position of the first, for an attention function of your own.

        The cache must be made with `same_positions=True`. It does not see the queries, so it evicts only if it has a
        `content_spread`, and it cannot check that the queries keep to that. Padding comes back as zeros.
        """
        if not self.same_positions:
            raise ValueError(
                "heads may keep different positions; use attend, or make the cache with same_positions=True"
            )
        check_keys_and_values(k, v)
        check_heads(self.prior, k, self.prior.num_heads)
        self._check_follows(k, v, position)
        with _computing(k):
            state = self._started(k, v)
            state.append(None, k, v)
            state.check_unseen_queries(k)
            (store,) = state.storage.stores
            kept = *store.view(), store.first
            state.evict(self.rollback)
        if k.shape[2]:
            self._state = state
        return kept

    def attend_by(self, attend: Callable[[State], Tensor], k: Tensor, v: Tensor) -> Tensor:
        """Add tokens and return what a function makes of all that is held, before anything is evicted.

        For attention of another kind than the cache computes. It does not look at the queries, so the cache must have
        a tolerance of 0: then it evicts only what its prior hides, and the function must hide that too.
        """
        if self.tolerance > 0 or self.content_spread is None or self.same_positions:
            raise ValueError("attend_by needs a cache with tolerance=0 and a content_spread, without same_positions")
        check_keys_and_values(k, v)
        check_heads(self.prior, k, self.prior.num_heads)
        self._check_follows(k, v, None)
        with _computing(k):
            state = self._started(k, v)
            state.append(None, k, v)
            out = attend(state)
            state.evict(self.rollback)
        self._state = state
        return out

    def crop(self, length: int) -> None:
        """Take back all positions from `length` on.

        That is possible down to `rollback` below the longest so far, and farther as long as nothing is evicted.
        """
        if not is_whole(length, 0, self.length):
            given = f"{length:,}" if is_whole(length, 0, 10**15) else shown(length)
            raise ValueError(
                f"cannot crop to {given} positions; the cache has {self.length:,}, and a whole number from 0 to that "
                "is needed"
            )
        for store in self._state.storage.stores:
            if length < store.complete_from:
                raise ValueError(
                    f"cannot crop to {length:,} positions: keys before {store.first:,} are evicted, which queries "
                    f"there may need; make the cache with rollback={self.rollback + store.complete_from - length} or "
                    "more"
                )
        state = self._state.copy()
        state.remove_last(self.length - length)
        state.step = self._state.step
        self._state = state

    def reorder(self, index: Tensor) -> None:
        """Let sequence b continue what sequence `index[b]` has so far; any number of sequences."""
        padding = self.padding
        started = self._state.settled is not None
        index = check_index(index, self.batch if started else None if padding is None else len(padding))
        with _computing(index):
            state = self._state.copy()
            state.reorder(index)
        self._state = state

    @property
    def length(self) -> int:
        """Positions so far."""
        return self._state.length

    @property
    def padding(self) -> Tensor | None:
        """How many of the first positions of each sequence are padding, `[B]`; None if there is no padding."""
        return self._state.padding

    @property
    def batch(self) -> int:
        """Sequences; 0 while the cache is empty."""
        return self._state.storage.batch

    @property
    def first(self) -> int:
        """The oldest position that any head keeps."""
        return self._state.storage.first

    @property
    def bytes(self) -> int:
        """Held now, room for the next tokens included, and sinks."""
        sinks = self._state.sinks
        return self._state.storage.bytes + (0 if sinks is None else sinks.bytes)

    @property
    def full_bytes(self) -> int:
        """What all keys and values so far would take."""
        return self.length * self._state.storage.bytes_per_position

    @property
    def spans(self) -> list[int | None]:
        """Per key/value head: how many of the latest positions a query needs; None for all."""
        return self._state.storage.spans

    def __str__(self) -> str:
        bounded = [span for span in self.spans if span is not None]
        share = f" ({self.bytes / self.full_bytes:.1%})" if self.full_bytes else ""
        spans = f" to the last {min(bounded):,} … {max(bounded):,} positions" if bounded else ""
        if isinstance(without_sinks(self.prior), ConditionedPrior):
            spans += "; a conditioned prior, so only keys that a static factor hides are evicted"
        return (
            f"{self.length:,} positions, {self.bytes / 1e6:.1f} MB of {self.full_bytes / 1e6:.1f} MB{share}; "
            f"{len(bounded)} of {len(self.spans)} key heads bounded{spans}"
        )

    def __copy__(self) -> LayerCache:
        return copy.deepcopy(self)  # a shallow copy would write to the same memory

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        """A cache for the same layer that goes on by itself: it shares the prior and the query scale alone.

        If these are copied with it, as parts of a model, it takes the copies.
        """
        given = (self.prior, without_sinks(self.prior), self.query_scale)
        shared = {id(x): memo.get(id(x), x) for x in given}
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(vars(self), {**memo, **shared}))
        return new

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        if self._state.snapshot is not None:
            self._state.snapshot.count_again(self.prior, self.query_scale)

    def _check_follows(self, k: Tensor, v: Tensor, position: int | None, is_new: bool = True) -> None:
        """Raise an error if these tokens cannot follow those that the cache has."""
        state = self._state
        check_position(position, state.length)
        known = state.settled
        if is_new and state.padding is not None and len(state.padding) != len(k):
            raise ValueError(f"padding is set for {len(state.padding)} sequences and the batch has {len(k)}")
        if known is None:
            return
        if known.source is not self.prior or known.query_scale is not self.query_scale:
            raise ValueError(CHANGED)
        state.compare(k.shape[2])
        if is_new and state.storage.shapes is not None:
            check_like_held(k, v, state.storage.stores[0].k, state.storage.shapes)

    def _started(self, k: Tensor, v: Tensor) -> State:
        """A copy of the state that has a certificate."""
        state = self._state.copy()
        if state.certificate is None:
            state.start(k, v, self._new_certificate(k))
        return state

    def _new_certificate(self, k: Tensor) -> Certificate:
        static = without_sinks(self.prior)
        if isinstance(static, ConditionedPrior):
            static = static.static_factor or Uniform(static.num_heads)
        return Certificate(
            static, self.query_scale, self.scale_prior,
            softmax_scale=k.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            tolerance=self.tolerance, content_spread=self.content_spread, limits=self.limits,
            key_norm=torch.zeros(k.shape[1], dtype=torch.float64, device=k.device), source=self.prior,
        )  # fmt: skip


@contextmanager
def unchanged_on_error(caches: Sequence[LayerCache]) -> Iterator[None]:
    """Caches that are as before if the block raises an error.

    Until the block ends, memory is also that of what the caches held before it. If the block takes some of that back,
    the tokens that it adds then go to new memory.
    """
    before = [(cache, cache._state.copy()) for cache in caches]
    for cache in caches:
        cache._state.storage.protect()
    try:
        yield
    except BaseException:
        for cache, state in before:
            cache._state = state
        raise
    for cache, state in before:
        if not state.storage.is_protected:  # by a block around this one
            cache._state.storage.unprotect()


def _computing(like: Tensor) -> AbstractContextManager[None]:
    """No gradients, no autocast, and tensors that can be written to outside of inference mode."""
    autocast = torch.is_autocast_enabled(like.device.type)
    plain = not (autocast or torch.is_grad_enabled() or torch.is_inference_mode_enabled())
    return nullcontext() if plain else _without_modes(like, autocast)


@contextmanager
def _without_modes(like: Tensor, autocast: bool) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), without_autocast(like) if autocast else nullcontext():
        yield
