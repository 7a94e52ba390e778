"""What tests of long sequences of calls share: dense attention in float64, and all that a cache holds, to compare."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

import bayesattn as ba

# Evicts from sequences short enough for a test.
EARLY = ba.attention.cache.spans.SpanLimits(least_kept=24, least_freed=8, horizon=512)
# Values are unit vectors of this size, so that the output of attention is the posterior itself.
LONGEST = 240


class Failing(nn.Module):
    """`ScalableSoftmax` that raises `error` if it is set."""

    def __init__(self, num_heads: int, init: float) -> None:
        super().__init__()
        self.scale = ba.ScalableSoftmax(num_heads, init)
        self.error: BaseException | None = None

    def forward(self, visible: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        scale: Tensor = self.scale(visible)
        return scale


class Tokens(NamedTuple):
    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, G, M, D]
    v: Tensor  # [B, G, M, LONGEST]


def draw_tokens(
    seed: int, batch: int, heads: int, kv_heads: int, first: int, number: int, q_size: float, k_size: float
) -> Tokens:
    """Random tokens of positions from `first` on."""
    generator = torch.Generator().manual_seed(seed)
    q = q_size * torch.randn(batch, heads, number, 4, dtype=torch.float64, generator=generator)
    k = k_size * torch.randn(batch, kv_heads, number, 4, dtype=torch.float64, generator=generator)
    v = torch.eye(LONGEST, dtype=torch.float64)[first : first + number].expand(batch, kv_heads, -1, -1)
    return Tokens(q, k, v)


@torch.no_grad()
def dense_posterior(
    q: Tensor,
    k: Tensor,
    prior: ba.Prior | ba.Sinks,
    query_scale: Callable[[Tensor], Tensor] | None,
    scale_prior: bool,
    padding: Tensor | None,
) -> tuple[Tensor, float]:
    """Posterior of the last queries over all keys `[B, G, N, D]`, `[B, H, M, LONGEST]`, and the largest logit."""
    rows, n = q.shape[2], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    distance = torch.arange(n - rows, n)[:, None] - torch.arange(n)
    first = torch.zeros(len(q), dtype=torch.long) if padding is None else padding
    of_distance = prior.prior if isinstance(prior, ba.Sinks) else prior
    log_prior = of_distance(distance.clamp(min=0).double()).double().expand(len(q), -1, -1, -1)  # [B, H, M, N]
    if isinstance(prior, ba.Sinks):
        slot = torch.arange(n) - first[:, None]  # [B, N]
        of_sinks = prior.log_prior.double()[:, slot.clamp(0, prior.count - 1)].transpose(0, 1).unsqueeze(2)
        log_prior = torch.where((slot < prior.count)[:, None, None], of_sinks, log_prior)
    visible = (torch.arange(n - rows, n) + 1 - first[:, None]).clamp(min=0)  # [B, M]
    r = torch.ones(1) if query_scale is None else query_scale(visible.double()).double()[..., None]
    content = q @ k.mT * q.shape[3] ** -0.5
    logits = r * (content + log_prior.nan_to_num(neginf=0.0)) if scale_prior else r * content + log_prior
    hidden = (distance < 0) | log_prior.isneginf() | (torch.arange(n) < first[:, None, None, None])
    largest = logits.masked_fill(hidden, 0.0).abs().max().item()
    posterior = logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return nn.functional.pad(posterior, (0, LONGEST - n)), largest


def total_variation(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().sum(-1).max().item() / 2


def contents(cache: ba.LayerCache) -> list[Any]:
    """All that the cache holds but spare room, for ==."""
    state = cache._state
    known, snapshot = state.certificate, state.snapshot
    stores = [
        [store.heads, store.query_heads, *store.view(), store.first, store.size, store.span, store.complete_from]
        for store in state.storage.stores
    ]
    return _frozen([
        state.length, state.padding, state.most_padding, state.reserved, stores,
        None if snapshot is None else snapshot.values,
        None if state.sinks is None else [state.sinks.log_prior, state.sinks.k, state.sinks.v],
        None if known is None else [known.key_norm, known.likely, known.largest_spread, known.planned_spread,
                                    known.planned_length],
    ])  # fmt: skip


def _frozen(x: Any) -> Any:
    if isinstance(x, Tensor):
        return str(x.dtype), tuple(x.shape), x.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return [_frozen(each) for each in x] if isinstance(x, list) else x


T = TypeVar("T")


def saved_and_loaded(x: T) -> T:
    """Through `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: T = torch.load(file, weights_only=False)
    return loaded


def pickled(x: T) -> T:
    """Through `pickle`."""
    loaded: T = pickle.loads(pickle.dumps(x))
    return loaded


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, copy.copy, pickled, saved_and_loaded]
