"""What tokens change in a cache, all of it, so that a call that fails changes nothing.

A call works on a copy, which takes the place of the state once nothing can fail any more. Copies are cheap: they share
their tensors. These are replaced or extended, and what a state holds is never overwritten.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesattn.attention.cache.attend import attend_to_store
from bayesattn.attention.cache.checks import Snapshot, check_finite
from bayesattn.attention.cache.spans import Certificate, norms
from bayesattn.attention.cache.storage import Storage, shallow_copy
from bayesattn.attention.inputs import all_finite, can_check, check_query_scale
from bayesattn.errors import NotFiniteError


@dataclass
class State:
    """Positions so far, and what follows from them."""

    storage: Storage
    length: int = 0
    padding: Tensor | None = None  # [B]
    most_padding: int = 0
    reserved: int = 0
    certificate: Certificate | None = None
    snapshot: Snapshot | None = None

    def copy(self) -> State:
        """One that changes on its own."""
        new = shallow_copy(self)
        new.storage = self.storage.copy()
        new.certificate = None if self.certificate is None else shallow_copy(self.certificate)
        return new

    def set_padding(self, padding: Tensor) -> None:
        """Hide the first positions of each sequence."""
        self.most_padding = int(padding.max())
        self.padding = padding if self.most_padding else None

    def start(self, k: Tensor, v: Tensor, certificate: Certificate) -> None:
        """Prepare for keys and values such as these."""
        self.certificate = certificate
        self.snapshot = Snapshot(certificate.prior, certificate.query_scale)
        self.storage.start(k, v, certificate.prior.num_heads)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next positions, or raise an error if they are not finite. Padding is held as zeros."""
        assert self.certificate is not None
        k, v = self._without_padding(k, self.length), self._without_padding(v, self.length)
        check_finite("v", v)
        self.certificate.add_keys(k)
        self.storage.append(k, v, self.reserved)
        self.length += k.shape[2]

    def attend(self, q: Tensor) -> Tensor:
        """Attention of the last positions, whose queries these are, `[B, H, M, Dv]`."""
        assert self.certificate is not None
        q = self._without_padding(q, self.length - q.shape[2])
        r, query_norms = self._query_scales(q), norms(q)
        self.certificate.check_logits(q, query_norms, r)
        self.certificate.check_queries(self.storage.stores, q, query_norms, r, self.length, self.padding)
        out = self._attend_to_stores(q, r)
        if can_check(out) and not all_finite(out):
            raise NotFiniteError("the values are too large: their mean is not finite; make them smaller")
        return out

    def check_unseen_queries(self, k: Tensor) -> None:
        """Raise an error if queries of these latest keys, within the given spread, may need keys that are evicted."""
        assert self.certificate is not None
        heads = self.certificate.prior.num_heads
        self.certificate.check_unseen_queries(
            self.storage.stores, k.shape[2], lambda: self._query_scales(k[:, :1].expand(-1, heads, -1, -1)), self.length
        )

    def evict(self, rollback: int) -> None:
        """Plan spans if need be, and drop what no later query can need, nor one after taking `rollback` tokens back."""
        assert self.certificate is not None
        if self.certificate.needs_plan(self.length):
            fewest_visible = max(1, self.length - self.most_padding - rollback)
            self.storage.set_spans(self.certificate.plan(self.length, fewest_visible))
        if self.length >= self.certificate.limits.least_kept:
            self.storage.evict(self.length - rollback)

    def remove_last(self, tokens: int) -> None:
        """Drop the latest positions."""
        self.length -= tokens
        self.storage.remove_last(tokens)

    def reorder(self, index: Tensor) -> None:
        """Let sequence b be what sequence `index[b]` was."""
        self.storage.reorder(index)
        if self.padding is not None:
            self.set_padding(self.padding.index_select(0, index.to(self.padding.device)))

    def _without_padding(self, x: Tensor, first: int) -> Tensor:
        """x `[B, *, M, *]`, of positions from `first` on, with zeros where there is padding."""
        if self.padding is not None and first < self.most_padding:
            position = torch.arange(first, first + x.shape[2], device=x.device)
            hidden = position < self.padding.to(x.device)[:, None]  # [B, M]
            x = x.masked_fill(hidden[:, None, :, None], 0.0)
        return x

    def _query_scales(self, q: Tensor) -> Tensor | None:
        """r of the last queries, `[1 or B, H, M]`."""
        assert self.certificate is not None
        if self.certificate.query_scale is None:
            return None
        visible = torch.arange(self.length - q.shape[2] + 1, self.length + 1, device=q.device)
        if self.padding is not None:
            visible = (visible - self.padding.to(q.device)[:, None]).clamp(min=0)
        r = self.certificate.query_scale(visible.double() if q.dtype == torch.float64 else visible)
        if not isinstance(r, Tensor):
            raise TypeError(f"the query_scale module returned a {type(r).__name__}; a tensor is needed")
        return check_query_scale(r, q).to(torch.promote_types(q.dtype, torch.float32))

    def _attend_to_stores(self, q: Tensor, r: Tensor | None) -> Tensor:
        assert self.certificate is not None
        known, stores = self.certificate, self.storage.stores
        out = q.new_empty(*q.shape[:3], stores[0].v.shape[3])
        for store in stores:
            heads = slice(None) if len(stores) == 1 else store.query_heads
            part = attend_to_store(
                store, q[:, heads], None if r is None else r[:, heads], known.prior, scale_prior=known.scale_prior,
                softmax_scale=known.softmax_scale, padding=self.padding, most_padding=self.most_padding,
                tolerance=known.tolerance / 2,
            )  # fmt: skip
            if len(stores) == 1:
                return part
            out[:, heads] = part
        return out
