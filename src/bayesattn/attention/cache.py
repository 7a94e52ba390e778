"""A key/value cache that forgets what the prior rules out.

Distances only grow: once a key is so far away that the prior forbids it to any later query, it can go. A query's
content can favour a far key over the prior's likeliest one by some number of nats, its *spread*:

    w_i = |σ|·‖q_i‖·max‖k‖ − σ q_i·k_likely

With every spread at most W, the posterior mass from distance s on is at most Σ_{d≥s} exp(r·(t_d − t_likely + W)), a
sum over the table: the *span* is the smallest s that leaves at most half of the tolerance (the other half is for the
pruning of `bayesian_attention`). W is given, or taken from the queries seen so far with a margin; each later query is
held against it, and one that is beyond and may need what is gone is refused rather than answered wrongly.

Shape letters: B batch, H query heads, G key/value heads, M new tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.attention.api import bayesian_attention, check_inputs
from bayesattn.attention.plan import NEAR_PEAK
from bayesattn.priors.base import Prior

# Shorter than this nothing is forgotten: there is little to gain, and the spread is not yet known well.
LEAST_KEPT = 256
# The spread planned for, relative to the largest seen, and the share of it that makes for a new plan.
MARGIN, STRAINED = 1.5, 0.8
# Spans are computed for positions up to this, or twice the present ones if that is more; one longer than half of it
# counts as infinite, since the tail might not end there.
HORIZON = 2**16
# Heads are stored together if their spans agree to about this factor.
ALIKE = 4


@dataclass
class _Store:
    """The keys and values of some heads: positions `first` … of the sequence, in storage with room for more."""

    heads: Tensor  # [g], key/value heads
    query_heads: Tensor  # [h]
    likely: Tensor  # [h], distance of each one's likeliest key
    k: Tensor  # [B, g, capacity, D]
    v: Tensor
    first: int = 0  # position of the oldest key
    begin: int = 0  # where that is in the storage
    size: int = 0
    span: int | None = None  # distances from here on are not needed; None: all are
    table: Tensor | None = None  # the log-prior, [h, n], farthest distance first
    hides: bool = False  # whether some of it is −inf

    def append(self, k: Tensor, v: Tensor, reserve: int) -> None:
        new, end = k.shape[2], self.begin + self.size
        if end + new > self.k.shape[2]:
            self.move(max(self.size + new + max(64, self.size // 8), reserve))
            end = self.size
        self.k[:, :, end : end + new] = k
        self.v[:, :, end : end + new] = v
        self.size += new

    def move(self, capacity: int) -> None:
        kept = slice(self.begin, self.begin + self.size)
        k, v = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (self.k, self.v))
        k[:, :, : self.size] = self.k[:, :, kept]
        v[:, :, : self.size] = self.v[:, :, kept]
        self.k, self.v, self.begin = k, v, 0

    @property
    def group(self) -> int:
        return len(self.query_heads) // len(self.heads)

    def log_prior(self, prior: Prior, like: Tensor) -> Tensor:
        """Of the distances between the latest position and all that are kept, farthest first, [h, size]."""
        if self.table is None or self.table.shape[1] < self.size or self.table.dtype.itemsize < like.dtype.itemsize:
            n = max(1024, 1 << (self.size - 1).bit_length())
            dtype = torch.promote_types(like.dtype, torch.float32)
            distances = torch.arange(n - 1, -1, -1, device=like.device, dtype=dtype)
            self.table = prior(distances)[self.query_heads]
            self.hides = bool(self.table.isneginf().any())
        return self.table[:, self.table.shape[1] - self.size :]

    def forget_before(self, position: int) -> None:
        gone = min(self.size, max(0, position - self.first))
        self.first, self.begin, self.size = self.first + gone, self.begin + gone, self.size - gone
        if gone and self.size * 2 < self.k.shape[2]:
            self.move(self.size + max(64, self.size // 8))

    def view(self) -> tuple[Tensor, Tensor]:
        kept = slice(self.begin, self.begin + self.size)
        return self.k[:, :, kept], self.v[:, :, kept]

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class LayerCache:
    """Keys and values of one attention layer, those only that a later query can need.

    `attend` takes the tokens that follow those it has, one or many, and returns the attention of their queries over all
    positions so far: what `bayesian_attention` would return for the whole sequence, up to posterior mass `tolerance`.
    A key/value head is bounded if each of its query heads has a finite span; the others keep everything. Inference
    only: no gradients.

    Args:
        prior: the prior of the layer's query heads. It must not change while the cache is in use.
        query_scale: a module such as `ScalableSoftmax`, called with the number of keys each query sees, or None. Spans
            are valid for all lengths to come: a temperature that grows with length shortens them, or with
            `scale_prior=False` lengthens them.
        scale_prior, softmax_scale: as for `bayesian_attention`.
        tolerance: in [0, 1), the posterior mass of any query that may be missing. 0 forgets only what is hidden.
        content_spread: nats, before the query scale, by which the content of any key may exceed that of the likeliest
            key; twice a bound on |σ q·k| is safe. None learns it from the queries that come, with a margin of half.
        rollback: how many tokens `crop` can take back at any time.
        together: keep the same positions for all heads, as `update` needs.
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
        together: bool = False,
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
        self.content_spread, self.rollback, self.together = content_spread, rollback, together
        self.reset()

    def reset(self) -> None:
        """Back to an empty cache, for any batch."""
        self.length = 0  # positions so far
        self.padding: Tensor | None = None  # [B]
        self._stores: list[_Store] = []
        self._reserved = 0
        self._planned: float | None = None  # the spread spans are planned for
        self._horizon = 0
        self._seen = 0.0  # the largest spread so far
        self._key_norm = torch.zeros(0)  # [G]: the largest so far
        self._signature = self._sign()

    def pad_left(self, padding: Tensor | Sequence[int]) -> None:
        """Say how many of the first positions of each sequence are padding: it sees nothing and is not seen."""
        padding = torch.as_tensor(padding)
        if padding.dim() != 1 or padding.is_floating_point() or padding.min() < 0:
            raise ValueError(
                f"padding is {padding.tolist()}; one number of positions, at least 0, per sequence is needed"
            )
        if self.length:
            raise ValueError(f"the cache has {self.length:,} positions; padding is said before the first")
        self.padding = padding if padding.any() else None

    def reserve(self, length: int) -> None:
        """Expect this many positions, so that heads which keep all of them need not move as they grow."""
        self._reserved = length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, position: int | None = None) -> Tensor:
        """Add tokens and return the attention of the last `q.shape[2]` of them, `[B, H, Mq, Dv]`.

        `k` and `v` are `[B, G, M, D]` of the new tokens alone; q may have fewer rows, or none. `position` is where the
        caller thinks they start; it is checked.
        """
        with torch.no_grad():
            check_inputs(q, k, v)
            if q.shape[2] > k.shape[2]:
                raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}; queries are of the new tokens only")
            self._append(k, v, q.shape[1], position)
            try:
                out = self._answer(q)
            except BaseException:
                self._take_back(k.shape[2])
                raise
            self._forget()
            return out

    def update(self, k: Tensor, v: Tensor, *, position: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Add tokens, for an attention function of one's own, and return keys, values and the position of the first.

        For a cache made with `together=True`. Queries do not pass by here, so it forgets only if it has a
        `content_spread`, and nobody checks that it holds.
        """
        if not self.together:
            raise ValueError("heads may keep different positions; use attend, or make the cache with together=True")
        with torch.no_grad():
            self._append(k, v, self.prior.num_heads, position)
            store = self._stores[0]
            kept = *store.view(), store.first
            self._forget()
            return kept

    def crop(self, length: int) -> None:
        """Take back all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length:,} positions; the cache has {self.length:,}")
        for store in self._stores:
            needed = 0 if store.span is None else max(0, length - store.span + 1)
            if store.first > needed:
                raise ValueError(
                    f"cannot crop to {length:,} positions: keys before {store.first:,} are forgotten and queries there "
                    f"need those from {needed:,} on; make the cache with rollback={self.length - length} or more"
                )
        self._take_back(self.length - length)

    def reorder(self, index: Tensor) -> None:
        """Let sequence b continue what sequence `index[b]` has so far; any number of sequences."""
        for store in self._stores:
            index = index.to(store.k.device)
            store.k, store.v = store.k.index_select(0, index), store.v.index_select(0, index)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index.to(self.padding.device))

    @property
    def batch(self) -> int:
        """Sequences; 0 while the cache is empty."""
        return len(self._stores[0].k) if self._stores else 0

    @property
    def first(self) -> int:
        """The oldest position that any head keeps."""
        return min((store.first for store in self._stores), default=0)

    @property
    def bytes(self) -> int:
        """Held now, room for the next tokens included."""
        return sum(store.bytes for store in self._stores)

    @property
    def full_bytes(self) -> int:
        """What all keys and values so far would take."""
        per_position = (s.k[:, :, :1].nbytes + s.v[:, :, :1].nbytes for s in self._stores)
        return self.length * sum(per_position)

    @property
    def spans(self) -> list[int | None]:
        """Per key/value head: how many of the latest positions a query needs; None for all."""
        spans = {h: store.span for store in self._stores for h in store.heads.tolist()}
        return [spans[h] for h in sorted(spans)]

    def __str__(self) -> str:
        bounded = [span for span in self.spans if span is not None]
        share = f" ({self.bytes / self.full_bytes:.1%})" if self.full_bytes else ""
        spans = f" to the last {min(bounded):,} … {max(bounded):,} positions" if bounded else ""
        return (
            f"{self.length:,} positions, {self.bytes / 1e6:.1f} MB of {self.full_bytes / 1e6:.1f} MB{share}; "
            f"{len(bounded)} of {len(self.spans)} key heads bounded{spans}"
        )

    # What follows is in the order in which `attend` needs it.

    def _append(self, k: Tensor, v: Tensor, query_heads: int, position: int | None) -> None:
        if position is not None and position != self.length:
            raise ValueError(
                f"the tokens are said to start at position {position:,} and the cache has {self.length:,} positions; "
                "they must follow those (crop takes positions back)"
            )
        if query_heads != self.prior.num_heads or self.prior.num_heads % k.shape[1]:
            raise ValueError(
                f"the prior has {self.prior.num_heads} heads, q {query_heads} and k {k.shape[1]}; the first two must "
                "be equal and the last divide them"
            )
        if self.padding is not None and len(self.padding) != len(k):
            raise ValueError(f"padding was given for {len(self.padding)} sequences and the batch has {len(k)}")
        if k.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k has shape {list(k.shape)} and v {list(v.shape)}; [batch, heads, tokens, size] is needed"
            )
        if not self._stores:
            self._signature = self._sign()
            self._start(k, v)
        elif self._signature != self._sign():
            raise ValueError("the prior or the query scale changed since the cache was filled; reset it")
        first = self._stores[0]
        if k.shape[0] != first.k.shape[0] or k.dtype != first.k.dtype or k.device != first.k.device:
            raise ValueError(
                f"the cache holds {first.k.shape[0]} sequences of {first.k.dtype} on {first.k.device} and the new "
                f"tokens are {k.shape[0]} of {k.dtype} on {k.device}; they must agree"
            )
        for store in self._stores:
            some = slice(None) if len(self._stores) == 1 else store.heads
            store.append(k[:, some], v[:, some], self._reserved if store.span is None else 0)
        if k.numel():
            self._key_norm = torch.maximum(self._key_norm, k.norm(dim=-1).amax((0, 2)).double())
        self.length += k.shape[2]

    def _start(self, k: Tensor, v: Tensor) -> None:
        heads = torch.arange(k.shape[1], device=k.device)
        query_heads = torch.arange(self.prior.num_heads, device=k.device)
        likely = self._relative_table(HORIZON, k.device).lt(-NEAR_PEAK).int().argmin(-1)
        self._stores = [_Store(heads, query_heads, likely, k[:, :, :0], v[:, :, :0])]
        self._key_norm = torch.zeros(len(heads), dtype=torch.float64, device=k.device)
        if self.softmax_scale is None:
            self.softmax_scale = k.shape[3] ** -0.5

    def _take_back(self, tokens: int) -> None:
        self.length -= tokens
        for store in self._stores:
            store.size -= tokens

    def _answer(self, q: Tensor) -> Tensor:
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], self._stores[0].v.shape[3])
        r = self._scale(q.shape[2], q)
        self._certify(q, r)
        if len(self._stores) == 1:
            return self._posterior(self._stores[0], q, r)
        out = q.new_empty(*q.shape[:3], self._stores[0].v.shape[3])
        for store in self._stores:
            out[:, store.query_heads] = self._posterior(store, q, r)
        return out

    def _counts(self, rows: int, device: torch.device) -> Tensor:
        """How many keys each of the last queries sees, [M] or [B, M]."""
        counts = torch.arange(self.length - rows + 1, self.length + 1, device=device)
        return counts if self.padding is None else (counts - self.padding.to(device)[:, None]).clamp(min=0)

    def _scale(self, rows: int, q: Tensor) -> Tensor | None:
        if self.query_scale is None:
            return None
        counts = self._counts(rows, q.device)
        r = self.query_scale(counts.double() if q.dtype == torch.float64 else counts)
        return r if r.dim() == 3 else r.unsqueeze(0)  # [1 or B, H, M]

    def _certify(self, q: Tensor, r: Tensor | None) -> None:
        """Learn the spread of these queries, and refuse one that may rest on what is forgotten."""
        known = self._planned is not None or self.content_spread is not None
        for store in self._stores:
            if known and store.first == 0 and (store.span is None or self.content_spread is not None):
                continue  # nothing of theirs is forgotten, and nothing need be learned
            spread = self._spread(store, q, r)
            largest = spread.max().item()
            if not largest >= 0.0:  # NaN
                largest = math.inf if spread.isnan().any() else 0.0
            # Spans can have grown since keys were forgotten: what counts is how far away those are.
            nearest = self.length - q.shape[2] - store.first + 1
            planned = self._planned is not None and largest <= self._planned
            if store.first > 0 and not (planned and store.span is not None and nearest >= store.span):
                self._refuse_unless_certain(store, largest, nearest, r)
            if largest < math.inf:
                self._seen = max(self._seen, largest)

    def _spread(self, store: _Store, q: Tensor, r: Tensor | None) -> Tensor:
        """w of the last queries, [B, h, M]."""
        assert self.softmax_scale is not None
        q = q[:, store.query_heads]
        own = torch.arange(store.size - q.shape[2], store.size, device=q.device)
        key = store.begin + (own - store.likely[:, None]).clamp(min=0)
        head = torch.arange(len(store.query_heads), device=q.device)[:, None] // store.group
        content = self.softmax_scale * torch.linalg.vecdot(q, store.k[:, head, key])
        if r is not None:
            content = content * r[:, store.query_heads].sign()
        norms = self._key_norm[store.heads].repeat_interleave(store.group)
        return abs(self.softmax_scale) * 1.001 * q.norm(dim=-1) * norms[:, None] + 1e-3 - content

    def _refuse_unless_certain(self, store: _Store, spread: float, nearest: int, r: Tensor | None) -> None:
        """The plan does not cover these queries; perhaps the distances that are really forgotten do."""
        tails = self._log_tails(spread, *self._scale_range(r), self.length)
        mass = tails[store.query_heads, nearest:].exp().amax().item()
        if not mass <= self.tolerance / 2:
            raise ValueError(
                f"a query at position {nearest + store.first - 1:,} or after may put {min(mass, 1.0):.2g} of its "
                f"attention on keys before {store.first:,}, which the cache has forgotten, and "
                f"{self.tolerance / 2:.2g} is allowed; give the cache "
                f"content_spread={math.ceil(spread) if spread < math.inf else 'a number'} or more"
            )

    def _posterior(self, store: _Store, q: Tensor, r: Tensor | None) -> Tensor:
        if len(self._stores) > 1:
            q, r = q[:, store.query_heads], None if r is None else r[:, store.query_heads]
        k, v = store.view()
        farthest_first = store.log_prior(self.prior, q)
        documents = None
        if self.padding is not None and int(self.padding.max()) > store.first:
            position = torch.arange(store.first, store.first + store.size, device=q.device)
            documents = torch.where(position < self.padding.to(q.device)[:, None], -1, 0)
        if q.shape[2] == 1 and documents is None and not store.hides and q.dtype == farthest_first.dtype:
            return self._one_query(store, q, k, v, farthest_first, r)
        return bayesian_attention(
            q,
            k,
            v,
            farthest_first.flip(-1),
            query_scale=None if r is None else r.expand(len(q), -1, -1),
            scale_prior=self.scale_prior,
            softmax_scale=self.softmax_scale,
            document_ids=documents,
            tolerance=self.tolerance / 2,
        )

    def _one_query(self, store: _Store, q: Tensor, k: Tensor, v: Tensor, log_prior: Tensor, r: Tensor | None) -> Tensor:
        """The step of a decoder, without detours: the bias is a row of the table, and query heads that share keys are
        rows of one attention."""
        bias = log_prior.unflatten(0, (-1, store.group)).unsqueeze(0)  # [1, g, group, n]
        if r is not None:
            q = q * r.unsqueeze(-1)
            bias = bias * r.unflatten(1, (-1, store.group)) if self.scale_prior else bias
        rows = q.squeeze(2).unflatten(1, (-1, store.group))
        out = scaled_dot_product_attention(rows, k, v, attn_mask=bias.to(q.dtype), scale=self.softmax_scale)
        return out.flatten(1, 2).unsqueeze(2)

    def _forget(self) -> None:
        wanted = self.content_spread
        if wanted is None and self._seen > 0.0:
            strained = self._planned is None or self._seen > STRAINED * self._planned
            wanted = MARGIN * self._seen if strained else self._planned
        if wanted is None or self.length < LEAST_KEPT:
            return
        if self._planned != wanted or self.length > self._horizon // 2:
            self._planned, self._horizon = wanted, max(HORIZON, 2 << self.length.bit_length())
            self._assign(self._spans())
        for store in self._stores:
            if store.span is not None:
                store.forget_before(self.length - store.span + 1 - self.rollback)

    def _spans(self) -> list[int | None]:
        """Per key/value head, for every length from now to the horizon."""
        assert self._planned is not None
        tails = self._log_tails(self._planned, *self._scale_range(None), self._horizon)
        allowed = math.log(self.tolerance / 2) if self.tolerance else -math.inf
        needed = (tails <= allowed).logical_not().sum(-1)
        needed = needed.unflatten(0, (len(self._key_norm), -1)).amax(-1)  # [G]
        return [int(n) if n <= self._horizon // 2 else None for n in needed.tolist()]

    def _scale_range(self, r: Tensor | None) -> tuple[Tensor, Tensor]:
        """Smallest query scale and largest size of one, [H, 1] each; without `r`, of all queries to come."""
        if self.query_scale is None:
            one = torch.ones(self.prior.num_heads, 1, dtype=torch.float64)
            return one, one
        if r is None:
            first = max(1, int(self._counts(1, torch.device("cpu")).min()) - self.rollback)
            counts = torch.arange(first, self._horizon + 1, device=self._device, dtype=torch.float64)
            r = self.query_scale(counts).unsqueeze(0)
        r = r.double().transpose(0, 1).flatten(1)
        return r.amin(-1, keepdim=True), r.abs().amax(-1, keepdim=True)

    def _log_tails(self, spread: float, smallest: Tensor, largest: Tensor, n: int) -> Tensor:
        """Log of a bound on the posterior mass at distances d … n − 1, [H, n]."""
        table = self._relative_table(n, self._device)
        for store in self._stores:
            table[store.query_heads] -= table[store.query_heads, store.likely].unsqueeze(-1)
        smallest, largest = smallest.to(table.device), largest.to(table.device)
        if self.scale_prior:
            # Where the prior outweighs the spread a larger scale lowers the bound; elsewhere the tail is above 1.
            bound = torch.where(table.isneginf(), -torch.inf, smallest * (table + spread))
            bound = torch.where((smallest > 0) | table.isneginf(), bound, torch.inf)
        else:
            bound = table + largest * spread
        return bound.exp().flip(-1).cumsum(-1).flip(-1).log()

    def _relative_table(self, n: int, device: torch.device) -> Tensor:
        """The log-prior of causal distances below n relative to its peak, [H, n]."""
        table = self.prior(torch.arange(n, device=device, dtype=torch.float64)).double()
        return table - table.amax(-1, keepdim=True)

    def _assign(self, spans: list[int | None]) -> None:
        """Give every store its span; the first time, part the heads whose spans differ."""
        if len(self._stores) == 1 and not self.together and self._stores[0].span is None:
            self._stores = _part(self._stores[0], spans)
        for store in self._stores:
            longest = [spans[h] for h in store.heads.tolist()]
            store.span = None if None in longest else max(s for s in longest if s is not None)

    @property
    def _device(self) -> torch.device:
        return self._stores[0].k.device

    def _sign(self) -> tuple[object, ...]:
        """Changes when the prior or the query scale is replaced, or a parameter of theirs written to."""
        modules = [m for m in (self.prior, self.query_scale) if isinstance(m, nn.Module)]
        tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        versions = [0 if x.is_inference() else x._version for x in tensors]
        return (id(self.prior), id(self.query_scale), *map(id, tensors), *versions)


def _part(store: _Store, spans: list[int | None]) -> list[_Store]:
    """One store for each class of heads with like spans."""
    classes: dict[int | None, list[int]] = {}
    for head, span in zip(store.heads.tolist(), spans, strict=True):
        size = None if span is None else math.ceil(math.log(max(span, 64), ALIKE))
        classes.setdefault(size, []).append(head)
    if len(classes) == 1:
        return [store]
    k, v = store.view()
    parts = []
    for members in classes.values():
        heads = torch.tensor(members, device=k.device)
        query_heads = (heads[:, None] * store.group + torch.arange(store.group, device=k.device)).flatten()
        likely = store.likely[query_heads]
        parts.append(_Store(heads, query_heads, likely, k[:, heads], v[:, heads], first=store.first, size=store.size))
    return parts
