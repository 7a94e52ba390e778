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

import torch
from torch import Tensor

from bayesattn.attention.bounds import content_bound, likeliest_entry
from bayesattn.attention.cache.checks import check_finite
from bayesattn.attention.cache.storage import Store
from bayesattn.attention.inputs import can_check, evaluate_prior
from bayesattn.attention.problem import LARGEST_LOGIT, LARGEST_PRIOR
from bayesattn.errors import NotFiniteError, UserError, is_number, is_whole, shown
from bayesattn.priors.base import MOST_TOKENS, Prior

LARGEST_MARGIN = 1e6
# A spread above this is written with an exponent.
LARGEST_PLAIN_SPREAD = 1e6


@dataclass(frozen=True)
class SpanLimits:
    """When spans are planned. The defaults suit decoding; tests use shorter sequences.

    Args:
        least_kept: nothing is evicted from fewer positions. There is little to gain, and the spread is not known well.
        margin: the spread planned for, relative to the largest so far.
        replan_ratio: a spread above this share of the planned one makes a new plan.
        horizon: spans hold for positions up to this, or up to twice the present ones if that is more. A span longer
            than half of it counts as infinite, since the tail might not end there.
    """

    least_kept: int = 256
    margin: float = 1.5
    replan_ratio: float = 0.8
    horizon: int = 2**16

    def __post_init__(self) -> None:
        for name, least in (("least_kept", 0), ("horizon", 1)):
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


@dataclass
class Certificate:
    """What is known of the queries and keys of one layer, and the spans that follow from it.

    Args:
        key_norm: the largest norm of a key so far, `[G]`.
        likely: distance of the likeliest key of each query head, `[H]`.
        largest_spread: of the queries so far.
        planned_spread: the W that spans are planned for; None before the first plan.
        planned_length: positions up to which the spans hold.
    """

    prior: Prior
    query_scale: Callable[[Tensor], Tensor] | None
    scale_prior: bool
    softmax_scale: float
    tolerance: float
    content_spread: float | None
    limits: SpanLimits
    key_norm: Tensor
    likely: Tensor = field(init=False)
    farthest_likely: int = field(init=False)
    largest_spread: float = 0.0
    planned_spread: float | None = None
    planned_length: int = 0

    def __post_init__(self) -> None:
        distance = torch.arange(self.limits.horizon, device=self.key_norm.device)
        self.likely = likeliest_entry(self._relative_table(self.limits.horizon), distance)
        self.farthest_likely = int(self.likely.max())

    def add_keys(self, k: Tensor) -> None:
        """Take note of new keys `[B, G, M, D]`; raise an error if they or their norms are not finite."""
        if k.numel():
            self.key_norm = torch.maximum(self.key_norm, norms(k).amax((0, 2)))
        if can_check(k) and not self.key_norm.amax().item() < math.inf:
            check_finite("k", k)
            raise NotFiniteError("k has norms that are too large for float64; make the keys smaller")

    def check_logits(self, q: Tensor, query_norms: Tensor, r: Tensor | None) -> None:
        """Raise an error if queries `[B, H, M, D]` are not finite, or their products with keys too large to compute."""
        if not can_check(query_norms) or query_norms.numel() == 0:
            return
        query_norm, key_norm = query_norms.amax().item(), self.key_norm.amax().item()
        scale = max(1.0, abs(self.softmax_scale)) * max(1.0, 0.0 if r is None else r.abs().amax().item())
        if not query_norm * key_norm * scale <= LARGEST_LOGIT:
            check_finite("q", q)
            raise NotFiniteError(
                f"logits may reach {query_norm * key_norm * scale:.1e} (norms of queries reach {query_norm:.1e}, of "
                f"keys {key_norm:.1e}); at most {LARGEST_LOGIT:.0e} is allowed, make them smaller"
            )

    def check_queries(
        self,
        stores: Sequence[Store],
        q: Tensor,
        query_norms: Tensor,
        r: Tensor | None,
        length: int,
        padding: Tensor | None = None,
    ) -> None:
        """Take note of the last queries `[B, H, M, D]`; raise an error if one may need keys that are evicted."""
        if q.numel() == 0:
            return
        known = self.planned_spread is not None or self.content_spread is not None
        for store in stores:
            if known and store.first == 0 and (store.span is None or self.content_spread is not None):
                continue  # nothing of theirs is evicted, and nothing need be learned
            spread = self._spread(store, q, query_norms, r, padding)
            largest = spread.max().item()
            if not largest >= 0.0:  # NaN
                largest = math.inf if spread.isnan().any() else 0.0
            if not self._is_planned(store, largest, q.shape[2], length):
                self._check_evicted(store, largest, q.shape[2], r, length)
            if largest < math.inf:
                self.largest_spread = max(self.largest_spread, largest)

    def check_unseen_queries(
        self, stores: Sequence[Store], rows: int, query_scales: Callable[[], Tensor | None], length: int
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
        tails = self._log_tails(self.planned_spread, r, self.planned_length)
        allowed = math.log(self.tolerance / 2) if self.tolerance else -math.inf
        needed = (tails <= allowed).logical_not().sum(-1)
        needed = needed.unflatten(0, (len(self.key_norm), -1)).amax(-1)  # [G]
        return [int(n) if n <= self.planned_length // 2 else None for n in needed.tolist()]

    def _wanted_spread(self) -> float | None:
        if self.content_spread is not None or self.largest_spread == 0.0:
            return self.content_spread
        if self.planned_spread is None or self.largest_spread > self.limits.replan_ratio * self.planned_spread:
            return self.limits.margin * self.largest_spread
        return self.planned_spread

    def _spread(self, store: Store, q: Tensor, query_norms: Tensor, r: Tensor | None, padding: Tensor | None) -> Tensor:
        """w of the last queries, `[B, h, M]`.

        It is 0 where the likeliest key is before the start of the sequence: what is farther away is so as well.
        """
        q = q[:, store.query_heads]
        own = torch.arange(store.size - q.shape[2], store.size, device=q.device)
        likely = own - self.likely[store.query_heads, None]  # [h, M], counted from the first key held
        key = store.begin + likely.clamp(min=0)
        dtype = torch.promote_types(q.dtype, torch.float32)
        content = self.softmax_scale * torch.linalg.vecdot(q.to(dtype), store.k[:, store.kv_index, key].to(dtype))
        if r is not None:
            content = content * r[:, store.query_heads].sign()
        key_norm = self.key_norm[store.heads][store.kv_index]  # [h, 1]
        spread = content_bound(query_norms[:, store.query_heads], key_norm, self.softmax_scale) - content
        first = 0 if padding is None else padding.to(q.device)[:, None, None]  # of the sequence
        if padding is None and store.size - q.shape[2] >= self.farthest_likely:
            return spread
        return spread.masked_fill(likely + store.first < first, 0.0)

    def _is_planned(self, store: Store, spread: float, rows: int, length: int) -> bool:
        """Whether the plan covers the last `rows` queries, or nothing is evicted.

        Spans can have grown since keys were evicted: what counts is how far away those are.
        """
        if store.first == 0:
            return True
        if self.planned_spread is None or store.span is None or length > self.planned_length:
            return False
        return spread <= self.planned_spread and length - rows - store.first + 1 >= store.span

    def _check_evicted(self, store: Store, spread: float, rows: int, r: Tensor | None, length: int) -> None:
        """The plan does not cover the last `rows` queries; perhaps the distances that are really evicted do."""
        nearest = length - rows - store.first + 1
        tails = self._log_tails(spread, r, length)
        mass = tails[store.query_heads, nearest:].exp().amax().item()
        if not mass <= self.tolerance / 2:
            raise UserError(
                f"a query at position {nearest + store.first - 1:,} or after may put {mass if mass < 1.0 else 1.0:.2g} "
                f"of its attention on keys before {store.first:,}, which are evicted, and {self.tolerance / 2:.2g} is "
                f"allowed; give the cache content_spread={_rounded_up(spread)} or more"
            )

    def _log_tails(self, spread: float, r: Tensor | None, n: int) -> Tensor:
        """Log of a bound on the posterior mass at distances d … n − 1, `[H, n]`, for any of the query scales `r`."""
        table = self._relative_table(n)
        table = table - table.gather(-1, self.likely.unsqueeze(-1))
        smallest = largest = table.new_ones(len(table), 1)
        if r is not None:
            r = r.to(table).transpose(0, 1).flatten(1)
            smallest, largest = r.amin(-1, keepdim=True), r.abs().amax(-1, keepdim=True)
        if self.scale_prior:
            # Where the prior outweighs the spread a larger scale lowers the bound; elsewhere the tail is above 1.
            bound = torch.where(table.isneginf(), -torch.inf, smallest * (table + spread))
            bound = torch.where((smallest > 0) | table.isneginf(), bound, torch.inf)
        else:
            bound = torch.where(table.isneginf(), -torch.inf, table + largest * spread)
        return bound.exp().flip(-1).cumsum(-1).flip(-1).log()

    def _relative_table(self, n: int) -> Tensor:
        """The log-prior of causal distances below n relative to its peak, `[H, n]`."""
        distance = torch.arange(n, device=self.key_norm.device, dtype=torch.float64)
        table = evaluate_prior(self.prior, distance).double()
        return table - table.amax(-1, keepdim=True).clamp(min=-LARGEST_PRIOR)  # -inf if all is hidden


def norms(x: Tensor) -> Tensor:
    """Norms of vectors in float64: squares of large float32 numbers overflow, and rounded norms are no bounds."""
    return x.norm(dim=-1, dtype=torch.float64)


def _rounded_up(spread: float) -> str:
    if spread < LARGEST_PLAIN_SPREAD:
        return str(math.ceil(spread))
    return f"{1.01 * spread:.2e}" if spread < math.inf else "a number"
