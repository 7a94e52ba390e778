"""The certificate of the pruning cache: how far back each head must be kept, and which queries it covers.

Distances only grow: once the prior rules a key out for every later query, the key can be evicted. The content of a
query can favour a far key over the likeliest one by some number of nats, its *spread*:

    w_i = |σ|·‖q_i‖·max‖k‖ − σ q_i·k_likely

If every spread is at most W, the posterior mass at distances s and more is at most Σ_{d≥s} exp(r·(t_d − t_likely + W)),
a sum over the table. The *span* is the smallest s that leaves at most half of the tolerance. The other half is for the
pruning of `bayesian_attention`. W is given, or taken from the queries so far with a margin. Each later query is held
against it: if evicted keys could hold more than the tolerance, the call raises an error.

Shape letters: B batch, H query heads, G key/value heads, M new tokens; h query heads of a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesattn.attention.bounds import bound_of_product, content_bound, likeliest_entry
from bayesattn.attention.cache.arrays import Array, as_arrays, vecdot
from bayesattn.attention.cache.checks import CHANGED, Snapshot, check_finite
from bayesattn.attention.cache.scales import QueryScales
from bayesattn.attention.cache.storage import Heads, Store, select
from bayesattn.attention.inputs import can_check, evaluate_prior
from bayesattn.attention.problem import LARGEST_LOGIT, LARGEST_PRIOR
from bayesattn.errors import NotFiniteError, UserError, is_number, is_whole, shown
from bayesattn.priors.base import MOST_TOKENS, Prior
from bayesattn.priors.conditioned import ConditionedPrior
from bayesattn.priors.sinks import Sinks, without_sinks

LARGEST_MARGIN = 1e6
# A spread above this is written with an exponent.
LARGEST_PLAIN_SPREAD = 1e6


@dataclass(frozen=True)
class SpanLimits:
    """When spans are planned. The defaults suit decoding; tests use shorter sequences.

    Args:
        least_kept: nothing is evicted from fewer positions. There is little to gain, and the spread is not known well.
        least_freed: heads of shorter spans get storage of their own once that frees so many positions, averaged over
            all heads. Each part of the storage takes time for every token.
        margin: the spread planned for, relative to the largest so far.
        replan_ratio: a spread above this share of the planned one makes a new plan.
        horizon: spans hold for positions up to this, or up to twice the present ones if that is more. A span longer
            than half of it counts as infinite, since the tail might not end there.
    """

    least_kept: int = 256
    least_freed: int = 512
    margin: float = 1.5
    replan_ratio: float = 0.8
    horizon: int = 2**16

    def __post_init__(self) -> None:
        for name, least in (("least_kept", 0), ("least_freed", 0), ("horizon", 1)):
            if not is_whole(getattr(self, name), least, MOST_TOKENS):
                raise ValueError(
                    f"{name} of limits is {shown(getattr(self, name))}; a whole number from {least} to {MOST_TOKENS:,} "
                    "is needed"
                )
        if not is_number(self.margin) or not 1.0 <= self.margin <= LARGEST_MARGIN:
            raise ValueError(
                f"margin of limits is {shown(self.margin)}; a number from 1 to {LARGEST_MARGIN:g} is needed"
            )
        if not is_number(self.replan_ratio) or not 0.0 < self.replan_ratio <= 1.0:
            raise ValueError(f"replan_ratio of limits is {shown(self.replan_ratio)}; a number in (0, 1] is needed")


DEFAULT_LIMITS = SpanLimits()
# By how much a sum of squares may be rounded, relative to it, and the least square that does not vanish.
ROUNDING = {np.dtype(x): (float(np.finfo(x).eps), float(np.finfo(x).tiny)) for x in (np.float32, np.float64)}


class Token(NamedTuple):
    """Numbers of one token of each sequence. Norms are at least as large as they are without rounding."""

    queries: list[float]  # norms, one of each head of each sequence
    keys: list[float]  # norms, of each key head the largest of all sequences
    largest_value: float  # norm
    content: list[float]  # product of each query with the key of the same token; empty if it was not needed

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, needs_content: bool = True) -> Token | None:
        """From its queries, keys and values; None if their memory is no array, or their squares are not finite."""
        if q.dtype.itemsize < 4:
            q, k, v = q.float(), k.float(), v.float()
        arrays = as_arrays(q, k, v)
        if arrays is None:
            return None
        with np.errstate(all="ignore"):
            return Token.of_arrays(arrays, needs_content)

    @staticmethod
    def of_arrays(arrays: Sequence[Array], needs_content: bool) -> Token | None:
        """The same from arrays, with numpy's warnings off."""
        q, k, v = arrays
        batch, kv_heads, _, size = k.shape
        q, of_each_key = q.reshape(batch, kv_heads, -1, size), vecdot(k, k)
        of_queries, of_values = vecdot(q, q).ravel().tolist(), vecdot(v, v).ravel().tolist()
        of_keys = (of_each_key if batch == 1 else of_each_key.max(0)).ravel().tolist()
        if not sum(of_queries) + sum(of_keys) + sum(of_values) < math.inf:
            return None
        factor, vanished = _rounding(q.dtype, max(size, v.shape[3]))
        return Token(
            [math.sqrt(square * factor + vanished) for square in of_queries],
            [math.sqrt(square * factor + vanished) for square in of_keys],
            math.sqrt(max(of_values) * factor + vanished),
            vecdot(q, k).ravel().tolist() if needs_content else [],
        )


def _rounding(dtype: np.dtype[Any], terms: int) -> tuple[float, float]:
    """Factor and summand that make a sum of squares, as it was computed, at least the exact one."""
    eps, tiny = ROUNDING[dtype]
    return 1.0 + 2.0 * terms * eps, terms * tiny


@dataclass
class Certificate:
    """What is known of the queries and keys of one layer, and the spans that follow from it.

    Args:
        key_norm: the largest norm of a key so far, `[G]`; `key_norms` are the same numbers, where values are looked at.
        source: the prior as the cache has it; `prior` is the factor of it that all queries share, without its sinks.
        snapshot: what the prior and the query scale are; None while that is not recorded.
        likely: distance of the likeliest key of each query head, `[H]`; `own_likeliest` are the heads where it is 0.
        largest_spread: of the queries so far.
        planned_spread: the W that spans are planned for; None before the first plan.
        planned_length: positions up to which the spans hold.
        evaluated: the log-prior, relative to its peak, as it was last evaluated; kept to the end of a call.
    """

    prior: Prior
    query_scale: Callable[[Tensor], Tensor] | None
    scale_prior: bool
    softmax_scale: float
    tolerance: float
    content_spread: float | None
    limits: SpanLimits
    key_norm: Tensor
    source: Prior | ConditionedPrior | Sinks
    likely: Tensor = field(init=False)
    own_likeliest: frozenset[int] = field(init=False)
    key_norms: list[float] = field(init=False)
    snapshot: Snapshot | None = None
    largest_spread: float = 0.0
    planned_spread: float | None = None
    planned_length: int = 0
    evaluated: Tensor | None = None

    def __post_init__(self) -> None:
        self.key_norms = [0.0] * len(self.key_norm)
        distance = torch.arange(self.limits.horizon, device=self.key_norm.device)
        self.likely = likeliest_entry(self._relative_table(self.limits.horizon), distance)
        self.own_likeliest = frozenset((self.likely == 0).nonzero().flatten().tolist())

    @property
    def sinks(self) -> Sinks | None:
        """What is kept whatever the spans are."""
        return self.source if isinstance(self.source, Sinks) else None

    @property
    def only_hides(self) -> bool:
        """Whether only keys that are hidden can be evicted: a later query may favour any other."""
        return isinstance(without_sinks(self.source), ConditionedPrior)

    @property
    def evicted_mass(self) -> float:
        """The posterior mass of any query that evicted keys may have."""
        return 0.0 if self.only_hides else self.tolerance / 2

    def compare(self) -> None:
        """Raise an error if the prior or the query scale are not what they were."""
        if self.snapshot is not None and not self.snapshot.shows(self.source, self.query_scale):
            raise ValueError(CHANGED)

    def add_norms(self, of_keys: list[float]) -> None:
        """Take note of new keys, the largest norm of each head."""
        if any(map(gt, of_keys, self.key_norms)):
            self.key_norms = list(map(max, of_keys, self.key_norms))
            self.key_norm = self.key_norm.new_tensor(self.key_norms)

    def add_keys(self, k: Tensor) -> None:
        """Take note of new keys `[B, G, M, D]`; raise an error if they or their norms are not finite."""
        if k.numel():
            self.key_norm = torch.maximum(self.key_norm, norms(k).amax((0, 2)))
        if not can_check(k):
            return
        self.key_norms = self.key_norm.tolist()
        if not sum(self.key_norms) < math.inf:
            check_finite("k", k)
            raise NotFiniteError("k has norms that are too large for float64; make the keys smaller")

    def check_logits(self, q: Tensor, query_norm: float, scales: QueryScales | None) -> None:
        """Raise an error if queries `[B, H, M, D]` of norms up to `query_norm` are not finite, or their logits are too
        large to compute."""
        if self.keeps_logits_small(query_norm, 1.0 if scales is None else scales.at_most):
            return
        key_norm = max(self.key_norms)
        largest = query_norm * key_norm * max(1.0, abs(self.softmax_scale))
        if scales is not None:
            largest *= max(1.0, scales.r.abs().amax().item())
        if not largest <= LARGEST_LOGIT:
            check_finite("q", q)
            raise NotFiniteError(
                f"logits may reach {largest:.1e} (norms of queries reach {query_norm:.1e}, of keys {key_norm:.1e}); "
                f"at most {LARGEST_LOGIT:.0e} is allowed, make them smaller"
            )

    def keeps_logits_small(self, query_norm: float, largest_scale: float, key_norm: float = 0.0) -> bool:
        """Whether logits of queries of norms up to `query_norm` can be computed, with scales up to `largest_scale`.

        `key_norm` bounds that of keys to come.
        """
        largest = query_norm * max(key_norm, *self.key_norms)
        return largest * max(1.0, abs(self.softmax_scale)) * max(1.0, largest_scale) <= LARGEST_LOGIT

    def covers(self, stores: Sequence[Store], token: Token, are_positive: bool, length: int) -> bool:
        """Whether numbers alone show that one token of each sequence needs no evicted key, and take note of it.

        `are_positive` are its query scales. The likeliest keys are looked at where they are the token's own.
        """
        largest = self.largest_spread
        for store in stores:
            heads = self._compared_heads(store)
            if heads is None or self._is_within_given_spread(store, token, length):
                continue  # nothing need be learned either
            if not (are_positive and token.content and self.own_likeliest.issuperset(heads.query_numbers)):
                return False
            spread = self._spread_of_token(token, heads, store.group)
            if not self._is_planned(store, spread, 1, length):
                return False
            largest = max(largest, spread)
        self.largest_spread = largest
        return True

    def add_block(self, stores: Sequence[Store], q: Array, k: Array) -> bool:
        """Take note of tokens of which no query needed an evicted key: `[n, B, H, D]` and `[n, B, G, D]`, finite.

        Their query scales are positive. False, with nothing noted, if the spread of a head matters whose likeliest key
        is not the token's own.
        """
        compared = [heads for store in stores if (heads := self._compared_heads(store)) is not None]
        if not all(self.own_likeliest.issuperset(heads.query_numbers) for heads in compared):
            return False
        factor, vanished = _rounding(q.dtype, q.shape[3])
        of_keys: Array = vecdot(k, k).max((0, 1)).astype(np.float64)
        self.add_norms(np.sqrt(of_keys * factor + vanished).tolist())
        if compared:
            slope, intercept = bound_of_product(self.softmax_scale)
            q = q.reshape(*k.shape[:3], -1, k.shape[3])  # [n, B, G, R, D]
            bounds = slope * np.sqrt(vecdot(q, q).astype(np.float64) * factor + vanished)
            bounds *= np.asarray(self.key_norms)[:, None]
            bounds -= self.softmax_scale * vecdot(q, k[..., None, :])
            of_heads = bounds.max((0, 1)).ravel().tolist()
            largest = intercept + max(of_heads[head] for heads in compared for head in heads.query_numbers)
            self.largest_spread = max(self.largest_spread, largest)
        return True

    def check_queries(
        self,
        stores: Sequence[Store],
        q: Tensor,
        query_norms: Tensor,
        scales: QueryScales | None,
        length: int,
        padding: Tensor | None = None,
    ) -> None:
        """Take note of the last queries `[B, H, M, D]` of these norms `[B, H, M]`; raise an error if one may need keys
        that are evicted."""
        if q.numel() == 0:
            return
        for store in stores:
            heads = self._compared_heads(store)
            if heads is None:
                continue
            largest = self._largest_spread(store, heads, q, query_norms, scales, padding)
            if not self._is_planned(store, largest, q.shape[2], length):
                self._check_evicted(store, largest, q.shape[2], scales, length)
            if largest < math.inf:
                self.largest_spread = max(self.largest_spread, largest)

    def needs_content(self, stores: Sequence[Store]) -> bool:
        """Whether `check_queries` may need the content of the next queries' own keys."""
        return any(self._compared_heads(store) is not None for store in stores)

    def _compared_heads(self, store: Store) -> Heads | None:
        """The heads of a store whose spreads matter: where keys are evicted, or spreads are still to be learned."""
        known = self.planned_spread is not None or self.content_spread is not None
        if known and store.first == 0:  # nothing of theirs is evicted
            return store.bounded if self.content_spread is None else None
        return store.all

    def _is_within_given_spread(self, store: Store, token: Token, length: int) -> bool:
        """Whether norms alone show that a token keeps to the given spread, as they do for normalised queries."""
        if self.content_spread is None:
            return False
        spread = 2 * content_bound(max(token.queries), max(self.key_norms), self.softmax_scale)
        return spread <= self.content_spread and self._is_planned(store, spread, 1, length)

    def check_unseen_queries(
        self, stores: Sequence[Store], rows: int, query_scales: Callable[[], QueryScales | None], length: int
    ) -> None:
        """`check_queries` for any `rows` queries whose spread is at most the given one."""
        for store in stores:
            if not self._is_planned(store, self.planned_spread or 0.0, rows, length):
                self._check_evicted(store, self.planned_spread or 0.0, rows, query_scales(), length)

    def needs_plan(self, length: int) -> bool:
        """Whether the spans do not hold for the queries to come, or none are planned yet."""
        wanted = self._wanted_spread()
        if wanted is None or length < self.limits.least_kept:
            return False
        return self.planned_spread != wanted or length > self.planned_length // 2

    def plan(self, length: int, fewest_visible: int) -> list[int | None]:
        """New spans: per key/value head, how many of the latest positions a query needs; None for all.

        Every query to come sees at least `fewest_visible` keys.
        """
        self.planned_spread = self._wanted_spread()
        self.planned_length = max(self.limits.horizon, 2 << length.bit_length())
        return self.spans(fewest_visible)

    def spans(self, fewest_visible: int) -> list[int | None]:
        """The spans of the present plan, which hold for every length up to `planned_length`."""
        assert self.planned_spread is not None
        r = None
        if self.query_scale is not None:
            visible = torch.arange(fewest_visible, self.planned_length + 1, device=self.key_norm.device)
            r = self.query_scale(visible.double()).unsqueeze(0)
            if r.shape != (1, len(self.likely), len(visible)):
                raise ValueError(
                    f"the query_scale module returned shape {list(r.shape[1:])} for {len(visible):,} counts; "
                    f"{[len(self.likely), len(visible)]} is needed"
                )
        needed = (self._tails(self.planned_spread, r, self.planned_length) <= self.evicted_mass).logical_not().sum(-1)
        needed = needed.unflatten(0, (len(self.key_norm), -1)).amax(-1)  # [G]
        return [int(n) if n <= self.planned_length // 2 else None for n in needed.tolist()]

    def _wanted_spread(self) -> float | None:
        if self.content_spread is not None or self.largest_spread == 0.0:
            return self.content_spread
        if self.planned_spread is None or self.largest_spread > self.limits.replan_ratio * self.planned_spread:
            return self.limits.margin * self.largest_spread
        return self.planned_spread

    def _spread_of_token(self, token: Token, heads: Heads, group: int) -> float:
        """The largest w of some heads whose likeliest key is the token's own; `group` query heads share a key head."""
        scale, key_norms, queries, content = self.softmax_scale, self.key_norms, token.queries, token.content
        slope, intercept = bound_of_product(scale)
        return intercept + max([
            slope * queries[first + head] * key_norms[head // group] - scale * content[first + head]
            for first in range(0, len(queries), len(self.likely))
            for head in heads.query_numbers
        ])  # fmt: skip

    def _largest_spread(
        self,
        store: Store,
        heads: Heads,
        q: Tensor,
        query_norms: Tensor,
        scales: QueryScales | None,
        padding: Tensor | None,
    ) -> float:
        """The largest w of the last queries in some heads of a store.

        It is 0 where the likeliest key is before the start of the sequence: what is farther away is so as well.
        """
        nearest_is_likeliest = padding is None and self.own_likeliest.issuperset(heads.query_numbers)
        rows, end, chosen = q.shape[2], store.begin + store.size, heads.of_queries
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = select(q, chosen)
        likely = None
        if nearest_is_likeliest:
            k = store.per_query(select(store.k.narrow(2, end - rows, rows), heads.in_store), 1)
        else:
            own = torch.arange(store.size - rows, store.size, device=q.device)  # counted from the first key held
            likely = own - select(self.likely, chosen, 0).unsqueeze(-1)  # [h, M]
            k = store.k[:, heads.kv_index, store.begin + likely.clamp(min=0)]
        content = torch.linalg.vecdot(q, k) if dtype == q.dtype else torch.linalg.vecdot(q.to(dtype), k.to(dtype))
        if scales is not None and not scales.are_positive:
            content = content * select(scales.r, chosen).squeeze(-1).sign()
        key_norm = store.per_query(select(self.key_norm, heads.of_keys, 0), 0).unsqueeze(-1)
        bound = content_bound(select(query_norms, chosen), key_norm, self.softmax_scale)
        spread = torch.sub(bound, content, alpha=self.softmax_scale)
        if likely is not None:
            first = 0 if padding is None else padding.to(q.device)[:, None, None]  # of the sequence
            spread = spread.masked_fill(likely + store.first < first, 0.0)
        largest: float = spread.max().item()
        if not largest >= 0.0:  # NaN
            largest = math.inf if spread.isnan().any() else 0.0
        return largest

    def _is_planned(self, store: Store, spread: float, rows: int, length: int) -> bool:
        """Whether the plan covers the last `rows` queries, or nothing is evicted.

        Spans can have grown since keys were evicted: what counts is how far away those are.
        """
        if store.first == 0:
            return True
        if self.planned_spread is None or store.span is None or length > self.planned_length:
            return False
        return spread <= self.planned_spread and length - rows - store.first + 1 >= store.span

    def _check_evicted(self, store: Store, spread: float, rows: int, scales: QueryScales | None, length: int) -> None:
        """The plan does not cover the last `rows` queries; perhaps the distances that are really evicted do."""
        nearest = length - rows - store.first + 1
        tails = self._tails(spread, None if scales is None else scales.r, length)
        mass = tails[store.query_heads, nearest:].amax().item()
        if not mass <= self.evicted_mass:
            raise UserError(
                f"a query at position {nearest + store.first - 1:,} or after may put {mass if mass < 1.0 else 1.0:.2g} "
                f"of its attention on keys before {store.first:,}, which are evicted, and {self.evicted_mass:.2g} is "
                f"allowed; give the cache content_spread={_rounded_up(spread)} or more"
            )

    def _tails(self, spread: float, r: Tensor | None, n: int) -> Tensor:
        """A bound on the posterior mass at distances d … n − 1, `[H, n]`, for any of the query scales `r`."""
        table = self._relative_table(n)
        table = table - table.gather(-1, self.likely.unsqueeze(-1))
        smallest = largest = table.new_ones(len(table), 1)
        if r is not None:
            r = r.to(table).transpose(0, 1).flatten(1)
            smallest, highest = r.aminmax(dim=-1, keepdim=True)
            largest = torch.maximum(-smallest, highest)
        # −inf stays what it is if a number is added and the product is with a positive one.
        hidden = None if spread < math.inf and bool((smallest > 0).all()) else table.isneginf()
        if self.scale_prior:
            # Where the prior outweighs the spread a larger scale lowers the bound; elsewhere the tail is above 1.
            bound = table.add_(spread).mul_(smallest)
            if hidden is not None:
                bound = bound.masked_fill_(smallest <= 0, torch.inf)
        else:
            bound = table.add_(largest * spread)
        if hidden is not None:
            bound = bound.masked_fill_(hidden, -torch.inf)
        return bound.exp_().flip(-1).cumsum(-1).flip(-1)

    def _relative_table(self, n: int) -> Tensor:
        """The log-prior of causal distances below n relative to its peak, `[H, n]`."""
        if self.evaluated is None or self.evaluated.shape[1] != n:
            self.compare()
            distance = torch.arange(n, device=self.key_norm.device, dtype=torch.float64)
            table = evaluate_prior(self.prior, distance).double()
            if self.only_hides:
                table = torch.zeros_like(table).masked_fill(table.isneginf(), -torch.inf)
            # -inf if all is hidden
            self.evaluated = table - table.amax(-1, keepdim=True).clamp(min=-LARGEST_PRIOR)
        return self.evaluated


def norms(x: Tensor) -> Tensor:
    """Norms of vectors in float64: squares of large float32 numbers overflow, and rounded norms are no bounds."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _rounded_up(spread: float) -> str:
    if spread < LARGEST_PLAIN_SPREAD:
        return str(math.ceil(spread))
    return f"{1.01 * spread:.2e}" if spread < math.inf else "a number"
