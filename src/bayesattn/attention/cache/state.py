"""What tokens change in a cache, all of it, so that a call that fails changes nothing.

A call works on a copy, which takes the place of the state once nothing can fail any more. Copies are cheap: they share
their tensors, and what is prepared for steps. Tensors are replaced or extended, and what a state holds is never
overwritten: what follows `length` belongs to nobody.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesattn.attention.cache.attend import Hidden, attend_to_store
from bayesattn.attention.cache.checks import Snapshot, check_values
from bayesattn.attention.cache.scales import QueryScales, ScaleTable, can_look_up, evaluate, make_table
from bayesattn.attention.cache.sinks import HeldSinks
from bayesattn.attention.cache.spans import Certificate, Token, norms
from bayesattn.attention.cache.storage import Storage, select, shallow_copy
from bayesattn.attention.inputs import DTYPES, all_finite, can_check
from bayesattn.attention.problem import LARGEST_LOGIT, LARGEST_PRIOR
from bayesattn.attention.sinks import merge
from bayesattn.errors import NotFiniteError
from bayesattn.priors.conditioned import GivenPrior

if TYPE_CHECKING:
    from bayesattn.attention.cache.step import Pending, Step

NOTHING_HIDDEN = Hidden(None, 0, 0)
# The largest bound on a sum of values that is sure not to overflow.
SAFE_SUM = {dtype: torch.finfo(dtype).max / 2 for dtype in DTYPES}
# Tokens, read one at a time, after which the prior and the query scale are compared with what they were.
COMPARED_EVERY = 32


@dataclass
class State:
    """Positions so far, and what follows from them."""

    storage: Storage
    length: int = 0
    padding: Tensor | None = None  # [B]
    least_padding: int = 0
    most_padding: int = 0
    sinks: HeldSinks | None = None
    farthest_likely: int = 0  # of the distances that heads find likeliest
    reserved: int = 0
    settled: Certificate | None = None  # without what is pending
    pending: Pending | None = None  # the latest tokens, up to `length`, of which no note is taken yet
    snapshot: Snapshot | None = None
    scale_table: ScaleTable | None = None
    largest_value: float = 0.0  # at least the largest |v|; infinite where values are not looked at
    compared_at: int = 0  # the length at which the prior and the query scale were compared with the snapshot
    kind: tuple[object, ...] | None = None  # `kind_of` tokens that passed all checks
    step: Step | None = None  # prepared for the next token of each sequence; copies have none

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**vars(self), "step": None}

    @property
    def certificate(self) -> Certificate | None:
        """What is known of all queries and keys so far; None before the first."""
        self.settle()
        return self.settled

    def settle(self) -> None:
        """Take note of the tokens that are pending."""
        if self.pending is None:
            return
        assert self.settled is not None
        known, stores, tokens = shallow_copy(self.settled), self.storage.stores, self.length - self.pending.start
        if not known.add_block(stores, self.pending.q[:tokens], self.pending.k[:tokens]):
            q, k = self.pending.queries_and_keys(self.length)
            known.add_keys(k)
            known.check_queries(stores, q, norms(q), None, self.length)
        self.settled, self.pending = known, None

    def copy(self) -> State:
        """One that changes on its own."""
        new = shallow_copy(self)
        new.step = None
        new.storage = self.storage.copy()
        new.settled = None if self.settled is None else shallow_copy(self.settled)
        return new

    def set_padding(self, padding: Tensor) -> None:
        """Hide the first positions of each sequence."""
        self.least_padding, self.most_padding = int(padding.min()), int(padding.max())
        self.padding = padding if self.most_padding else None

    def start(self, k: Tensor, v: Tensor, certificate: Certificate) -> None:
        """Prepare for keys and values such as these."""
        self.settled = certificate
        self.snapshot = certificate.snapshot = Snapshot(certificate.source, certificate.query_scale)
        self.storage.start(k, v, certificate.prior.num_heads)
        if certificate.sinks is not None:
            self.sinks = HeldSinks.none_yet(certificate.sinks, k, v)
            self.farthest_likely = int(certificate.likely.max())

    def compare(self, new_tokens: int) -> None:
        """Raise an error if the prior or the query scale changed. For single tokens that is looked at now and then:
        their log-priors and scales are in tables, and whenever more are evaluated it is looked at as well."""
        assert self.settled is not None
        if new_tokens > 1 or not 0 <= self.length - self.compared_at < COMPARED_EVERY:
            self.settled.compare()
            self.compared_at = self.length

    def append(self, q: Tensor | None, k: Tensor, v: Tensor) -> Token | None:
        """Add the next positions, or raise an error if they are not finite. Padding is held as zeros.

        Return what `attend` needs to know if there is one token of each sequence.
        """
        assert self.certificate is not None
        if self.padding is not None:
            k, v = self._without_padding(k, self.length), self._without_padding(v, self.length)
        token = None if q is None else self._look_at(q, k, v)
        if token is None:
            self.largest_value = max(self.largest_value, check_values(v))
            self.certificate.add_keys(k)
        else:
            self.add_numbers(token)
        self.storage.append(k, v, self.reserved)
        if self.sinks is not None:
            self.sinks = self.sinks.append(k, v, self.length, self.padding, self.most_padding)
        self.length += k.shape[2]
        return token

    def add_numbers(self, token: Token) -> None:
        """Take note of a token's key and value."""
        assert self.certificate is not None
        self.largest_value = max(self.largest_value, token.largest_value)
        self.certificate.add_norms(token.keys)

    def attend(self, q: Tensor, token: Token | None = None, given: GivenPrior | None = None) -> Tensor:
        """Attention of the last positions, whose queries these are, `[B, H, M, Dv]`; `token` is what `append` gave.

        `given` is the conditioned prior of these queries, if they have one.
        """
        assert self.certificate is not None
        if self.padding is not None:
            q = self._without_padding(q, self.length - q.shape[2])
        scales, hidden = self._query_scales(q, token is not None or can_check(q)), self._hidden_before(q)
        stores, are_positive = self.storage.stores, scales is None or scales.are_positive
        if token is not None:
            self.certificate.check_logits(q, max(token.queries), scales)
        if token is None or not self.certificate.covers(stores, token, are_positive and hidden is None, self.length):
            norms_of_rows = norms(q)
            if token is None and can_check(q) and q.numel():
                self.certificate.check_logits(q, norms_of_rows.amax().item(), scales)
            self.certificate.check_queries(stores, q, norms_of_rows, scales, self.length, hidden)
        out = self._attend_to_stores(q, None if scales is None else scales.r, given)
        if self.may_overflow(out.dtype, scales) and can_check(out) and not all_finite(out):
            raise NotFiniteError("the values are too large: their mean is not finite; make them smaller")
        return out

    def may_overflow(self, dtype: torch.dtype, scales: QueryScales | None) -> bool:
        """Whether a sum of all values may be too large, or a log-prior times its scale."""
        largest_scale = 1.0 if scales is None else scales.at_most
        return not (
            self.largest_value * self.length <= SAFE_SUM[dtype] and largest_scale <= LARGEST_LOGIT / LARGEST_PRIOR
        )

    def _look_at(self, q: Tensor, k: Tensor, v: Tensor) -> Token | None:
        """What there is to know of one token of each sequence if it is finite: a single look, as it takes time."""
        if not (k.shape[2] == q.shape[2] == 1 and len(k) and k.is_cpu):
            return None
        assert self.certificate is not None
        q = q if self.padding is None else self._without_padding(q, self.length)
        return Token.of(q, k, v, self.certificate.needs_content(self.storage.stores))

    def check_unseen_queries(self, k: Tensor) -> None:
        """Raise an error if queries of these latest keys, within the given spread, may need keys that are evicted."""
        assert self.certificate is not None
        heads = self.certificate.prior.num_heads
        self.certificate.check_unseen_queries(
            self.storage.stores,
            k.shape[2],
            lambda: self._query_scales(k[:, :1].expand(-1, heads, -1, -1), can_check(k)),
            self.length,
        )

    def evict(self, rollback: int) -> None:
        """Plan spans if need be, and drop what no later query can need, nor one after taking `rollback` tokens back."""
        assert self.certificate is not None
        if self.certificate.needs_plan(self.length):
            fewest_visible = max(1, self.length - self.most_padding - rollback)
            spans = self.certificate.plan(self.length, fewest_visible)
            self.storage.set_spans(spans, self.certificate.limits.least_freed)
        self.certificate.evaluated = None
        if self.length >= self.certificate.limits.least_kept:
            self.storage.evict(self.length - rollback)

    def remove_last(self, tokens: int) -> None:
        """Drop the latest positions."""
        self.settle()
        self.length -= tokens
        self.storage.remove_last(tokens)

    def reorder(self, index: Tensor) -> None:
        """Let sequence b be what sequence `index[b]` was."""
        self.settle()
        self.storage.reorder(index)
        if self.sinks is not None:
            self.sinks = self.sinks.reorder(index)
        self.kind = None  # there may be another number of sequences
        if self.padding is not None:
            self.set_padding(self.padding.index_select(0, index.to(self.padding.device)))

    def _without_padding(self, x: Tensor, first: int) -> Tensor:
        """x `[B, *, M, *]`, of positions from `first` on, with zeros where there is padding."""
        if self.padding is not None and first < self.most_padding:
            position = torch.arange(first, first + x.shape[2], device=x.device)
            hidden = position < self.padding.to(x.device)[:, None]  # [B, M]
            x = x.masked_fill(hidden[:, None, :, None], 0.0)
        return x

    def _query_scales(self, q: Tensor, can_look: bool) -> QueryScales | None:
        """r of the last queries, of which values can be looked at or not."""
        assert self.certificate is not None
        module, first, stop = self.certificate.query_scale, self.length - q.shape[2] + 1, self.length + 1
        if module is None:
            return None
        visible = None
        if self.padding is not None:
            visible = torch.arange(first, stop, device=q.device) - self.padding.to(q.device)[:, None]
            visible = visible.clamp(min=0)
        if not (can_look and can_look_up(module, q)):
            self.certificate.compare()
            return evaluate(module, torch.arange(first, stop, device=q.device) if visible is None else visible, q)
        fewest = max(0, first - self.most_padding)
        if self.scale_table is None or not self.scale_table.has(fewest, stop, q):
            self.certificate.compare()
            self.scale_table = make_table(module, fewest, stop, q)
        return self.scale_table.look_up(slice(first, stop) if visible is None else visible)

    def _hidden(self) -> Hidden:
        """The positions that stores hide: padding, and after it the sinks, which are computed apart."""
        if self.sinks is None and self.padding is None:
            return NOTHING_HIDDEN
        count = 0 if self.sinks is None else self.sinks.count
        if self.padding is None:
            return Hidden(None, count, count)
        return Hidden(self.padding + count, self.least_padding + count, self.most_padding + count)

    def _hidden_before(self, q: Tensor) -> Tensor | None:
        """How many positions of each sequence hide the likeliest key of some of the last queries, `[B]`, or None."""
        if self.sinks is None:
            return self.padding
        hidden = self._hidden()
        if self.length - q.shape[2] - self.farthest_likely >= hidden.most:
            return None
        return torch.full((len(q),), hidden.least) if hidden.counts is None else hidden.counts

    def _attend_to_stores(self, q: Tensor, r: Tensor | None, given: GivenPrior | None) -> Tensor:
        """Attention to all that is kept, with query scales `[1 or B, H, M, 1]`."""
        assert self.certificate is not None
        known, hidden, outs, lses = self.certificate, self._hidden(), [], []
        for store in self.storage.stores:
            if not store.has_table(q):
                known.compare()
                store.make_table(known.prior, q)
            heads, has_all = store.all.of_queries, len(self.storage.stores) == 1
            out, lse = attend_to_store(
                store, q if has_all else select(q, heads), r if has_all or r is None else select(r, heads), given,
                scale_prior=known.scale_prior, softmax_scale=known.softmax_scale, hidden=hidden,
                tolerance=known.tolerance / 2, needs_lse=self.sinks is not None,
            )  # fmt: skip
            outs.append(out)
            if lse is not None:
                lses.append(lse)
        if self.sinks is None:
            return self.storage.join(outs)
        of_sinks = self.sinks.attend(
            q, r, length=self.length, padding=self.padding, most_padding=self.most_padding,
            scale_prior=known.scale_prior, softmax_scale=known.softmax_scale,
        )  # fmt: skip
        return merge(of_sinks, (self.storage.join(outs), self.storage.join(lses)), needs_lse=False)[0].to(q.dtype)
