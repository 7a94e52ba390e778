"""The pruning cache of one layer: keys and values without those that no later query can need.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bayesattn.attention.cache.attend import attend_to_store
from bayesattn.attention.cache.spans import DEFAULT_LIMITS, Certificate, SpanLimits
from bayesattn.attention.cache.storage import Storage
from bayesattn.attention.inputs import check_inputs
from bayesattn.priors.base import Prior


class LayerCache:
    """Keys and values of one attention layer, those only that a later query can need.

    `attend` takes the tokens that follow those it has, one or many. It returns the attention of their queries over all
    positions so far: what `bayesian_attention` would return for the whole sequence, up to posterior mass `tolerance`.
    If evicted keys could hold more attention than the tolerance, the call raises an error.
    A key/value head is bounded if each of its query heads has a finite span; the others keep everything. Inference
    only: no gradients.

    Args:
        prior: the prior of the layer's query heads. It must not change while the cache is in use.
        query_scale: a module such as `ScalableSoftmax`, called with the number of keys each query sees, or None. Spans
            are valid for all lengths to come: a query scale that grows with length shortens them, or with
            `scale_prior=False` lengthens them.
        scale_prior, softmax_scale: as for `bayesian_attention`.
        tolerance: in [0, 1), the posterior mass of any query that may be missing. 0 evicts only what the prior hides.
        content_spread: nats, before the query scale, by which the content of any key may exceed that of the likeliest
            key; twice a bound on |σ q·k| is safe. None learns it from the queries that come, with a margin of half.
        rollback: how many tokens `crop` can take back at any time.
        same_positions: keep the same positions for all heads, as `update` needs.
        limits: when spans are planned.
    """

    def __init__(
        self,
        prior: Prior,
        *,
        query_scale: Callable[[Tensor], Tensor] | None = None,
        scale_prior: bool = True,
        softmax_scale: float | None = None,
        tolerance: float = 1e-6,
        content_spread: float | None = None,
        rollback: int = 64,
        same_positions: bool = False,
        limits: SpanLimits = DEFAULT_LIMITS,
    ) -> None:
        if not isinstance(prior, Prior):
            raise TypeError(f"prior is a {type(prior).__name__}; a cache needs the layer's Prior")
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"tolerance is {tolerance}; it must be in [0, 1)")
        if content_spread is not None and not 0.0 <= content_spread < math.inf:
            raise ValueError(f"content_spread is {content_spread}; it must be a number of nats, at least 0")
        if rollback < 0:
            raise ValueError(f"rollback is {rollback}; it must be a number of tokens, at least 0")
        self.prior, self.query_scale, self.scale_prior = prior, query_scale, scale_prior
        self.softmax_scale, self.tolerance = softmax_scale, tolerance
        self.content_spread, self.rollback, self.same_positions = content_spread, rollback, same_positions
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """Back to an empty cache, for any batch."""
        self.length = 0  # positions so far
        self.padding: Tensor | None = None  # [B]
        self._reserved = 0
        self._storage = Storage(self.same_positions)
        self._certificate: Certificate | None = None
        self._versions = _parameter_versions(self.prior, self.query_scale)

    def pad_left(self, padding: Tensor | Sequence[int]) -> None:
        """Set how many of the first positions of each sequence are padding. It sees nothing and is not seen."""
        padding = torch.as_tensor(padding)
        if padding.dim() != 1 or padding.is_floating_point() or padding.min() < 0:
            raise ValueError(
                f"padding is {padding.tolist()}; one number of positions, at least 0, per sequence is needed"
            )
        if self.length:
            raise ValueError(f"the cache has {self.length:,} positions; padding must be set while it is empty")
        self.padding = padding if padding.any() else None

    def reserve(self, length: int) -> None:
        """Expect this many positions, so that heads which keep all of them need not move as they grow."""
        self._reserved = length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, position: int | None = None) -> Tensor:
        """Add tokens and return the attention of the last `q.shape[2]` of them, `[B, H, Mq, Dv]`.

        `k` and `v` are `[B, G, M, D]` of the new tokens alone; q may have fewer rows, or none. `position` is where the
        caller expects them to start; it is checked.
        """
        with torch.no_grad():
            check_inputs(q, k, v)
            if q.shape[2] > k.shape[2]:
                raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}; queries are of the new tokens only")
            certificate = self._append(k, v, q.shape[1], position)
            try:
                out = self._attend_to_all(q, certificate)
            except BaseException:
                self._remove_last(k.shape[2])
                raise
            self._evict(certificate)
            return out

    def update(self, k: Tensor, v: Tensor, *, position: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Add tokens and return keys, values and the position of the first, for an attention function of your own.

        The cache must be made with `same_positions=True`. It does not see the queries, so it evicts only if it has a
        `content_spread`, and it cannot check that the queries keep to that.
        """
        if not self.same_positions:
            raise ValueError(
                "heads may keep different positions; use attend, or make the cache with same_positions=True"
            )
        with torch.no_grad():
            certificate = self._append(k, v, self.prior.num_heads, position)
            (store,) = self._storage.stores
            kept = *store.view(), store.first
            self._evict(certificate)
            return kept

    def crop(self, length: int) -> None:
        """Take back all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length:,} positions; the cache has {self.length:,}")
        for store in self._storage.stores:
            needed = 0 if store.span is None else max(0, length - store.span + 1)
            if store.first > needed:
                raise ValueError(
                    f"cannot crop to {length:,} positions: keys before {store.first:,} are evicted and queries there "
                    f"need those from {needed:,} on; make the cache with rollback={self.length - length} or more"
                )
        self._remove_last(self.length - length)

    def reorder(self, index: Tensor) -> None:
        """Let sequence b continue what sequence `index[b]` has so far; any number of sequences."""
        self._storage.reorder(index)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index.to(self.padding.device))

    @property
    def batch(self) -> int:
        """Sequences; 0 while the cache is empty."""
        return self._storage.batch

    @property
    def first(self) -> int:
        """The oldest position that any head keeps."""
        return self._storage.first

    @property
    def bytes(self) -> int:
        """Held now, room for the next tokens included."""
        return self._storage.bytes

    @property
    def full_bytes(self) -> int:
        """What all keys and values so far would take."""
        return self.length * self._storage.bytes_per_position

    @property
    def spans(self) -> list[int | None]:
        """Per key/value head: how many of the latest positions a query needs; None for all."""
        return self._storage.spans

    def __str__(self) -> str:
        bounded = [span for span in self.spans if span is not None]
        share = f" ({self.bytes / self.full_bytes:.1%})" if self.full_bytes else ""
        spans = f" to the last {min(bounded):,} … {max(bounded):,} positions" if bounded else ""
        return (
            f"{self.length:,} positions, {self.bytes / 1e6:.1f} MB of {self.full_bytes / 1e6:.1f} MB{share}; "
            f"{len(bounded)} of {len(self.spans)} key heads bounded{spans}"
        )

    def _append(self, k: Tensor, v: Tensor, query_heads: int, position: int | None) -> Certificate:
        self._check_tokens(k, v, query_heads, position)
        if self._certificate is None:
            self._certificate = self._start(k, v)
        self._storage.append(k, v, self._reserved)
        self._certificate.add_keys(k)
        self.length += k.shape[2]
        return self._certificate

    def _check_tokens(self, k: Tensor, v: Tensor, query_heads: int, position: int | None) -> None:
        if position is not None and position != self.length:
            raise ValueError(
                f"the new tokens start at position {position:,} and the cache has {self.length:,} positions; "
                "they must follow those (crop takes positions back)"
            )
        if k.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k has shape {list(k.shape)} and v {list(v.shape)}; [batch, heads, tokens, size] is needed"
            )
        if query_heads != self.prior.num_heads or self.prior.num_heads % k.shape[1]:
            raise ValueError(
                f"the prior has {self.prior.num_heads} heads, q {query_heads} and k {k.shape[1]}; the first two must "
                "be equal and the last divide them"
            )
        if self.padding is not None and len(self.padding) != len(k):
            raise ValueError(f"padding is set for {len(self.padding)} sequences and the batch has {len(k)}")
        if not self._storage.stores:
            return
        if self._versions != _parameter_versions(self.prior, self.query_scale):
            raise ValueError("the prior or the query scale changed since the cache was filled; reset it")
        held = self._storage.stores[0].k
        if len(k) != len(held) or k.dtype != held.dtype or k.device != held.device:
            raise ValueError(
                f"the cache holds {len(held)} sequences of {held.dtype} on {held.device} and the new tokens are "
                f"{len(k)} of {k.dtype} on {k.device}; they must agree"
            )

    def _start(self, k: Tensor, v: Tensor) -> Certificate:
        self._versions = _parameter_versions(self.prior, self.query_scale)
        self._storage.start(k, v, self.prior.num_heads)
        return Certificate(
            self.prior, self.query_scale, self.scale_prior,
            softmax_scale=k.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            tolerance=self.tolerance, content_spread=self.content_spread, limits=self.limits,
            key_norm=torch.zeros(k.shape[1], dtype=torch.float64, device=k.device),
        )  # fmt: skip

    def _attend_to_all(self, q: Tensor, certificate: Certificate) -> Tensor:
        stores = self._storage.stores
        value_size = stores[0].v.shape[3]
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], value_size)
        r = self._query_scales(q)
        certificate.check_queries(stores, q, r, self.length)
        attend = partial(
            attend_to_store, prior=self.prior, scale_prior=self.scale_prior, softmax_scale=certificate.softmax_scale,
            padding=self.padding, tolerance=self.tolerance / 2,
        )  # fmt: skip
        if len(stores) == 1:
            return attend(stores[0], q, r)
        out = q.new_empty(*q.shape[:3], value_size)
        for store in stores:
            heads = store.query_heads
            out[:, heads] = attend(store, q[:, heads], None if r is None else r[:, heads])
        return out

    def _query_scales(self, q: Tensor) -> Tensor | None:
        """r of the last queries, `[1 or B, H, M]`."""
        if self.query_scale is None:
            return None
        visible = torch.arange(self.length - q.shape[2] + 1, self.length + 1, device=q.device)
        if self.padding is not None:
            visible = (visible - self.padding.to(q.device)[:, None]).clamp(min=0)
        r = self.query_scale(visible.double() if q.dtype == torch.float64 else visible)
        return r if r.dim() == 3 else r.unsqueeze(0)

    def _evict(self, certificate: Certificate) -> None:
        if certificate.needs_plan(self.length):
            padding = 0 if self.padding is None else int(self.padding.max())
            fewest_visible = max(1, self.length - padding - self.rollback)
            self._storage.set_spans(certificate.plan(self.length, fewest_visible))
        if self.length >= self.limits.least_kept:
            self._storage.evict(self.length - self.rollback)

    def _remove_last(self, tokens: int) -> None:
        self.length -= tokens
        self._storage.remove_last(tokens)


def _parameter_versions(*modules: object) -> tuple[object, ...]:
    """Changes when one of the modules is replaced, or a parameter or buffer of theirs is written to."""
    tensors = [x for m in modules if isinstance(m, nn.Module) for x in (*m.parameters(), *m.buffers())]
    versions = [0 if x.is_inference() else x._version for x in tensors]
    return (*map(id, modules), *map(id, tensors), *versions)
