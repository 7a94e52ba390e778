"""What training does to attention to prepare it for long texts: temperature jitter and in-batch negatives.

Neither is part of a model. The trainer installs them during training only, and a model in evaluation mode is not
affected.

Shape letters: B batch, S sequences of a group, H heads, N tokens, M the last of them, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bayesattn.attention import visible_counts
from bayesattn.attention.kernels.reference import softmax_posterior
from bayesattn.models.attention import DecoderAttention, QueryPrior, attend_with
from bayesattn.priors import GivenPrior, Prior
from bayesattn.training.recipe import Augmentation


@dataclass
class BatchPart:
    """Which contexts of a batch a forward pass has: those from `first` on, of `batch`; all if `batch` is 0.

    Every part draws numbers for the whole batch and takes its own. So if all parts draw from the same state of the
    generator, a context gets the same numbers however the batch is split.
    """

    first: int = 0
    batch: int = 0


@contextmanager
def augmented(model: nn.Module, settings: Augmentation, part: BatchPart | None = None) -> Iterator[None]:
    """Augment the attention of the model inside of the `with` block, while the model is in training mode.

    Args:
        model: its layers are `DecoderAttention`.
        settings: what to do.
        part: the part of the batch that the model has, up to date at each forward pass; by default the whole.
    """
    if not settings.in_batch_negatives and settings.temperature_jitter is None:
        yield
        return
    with attend_with(model, partial(_attend, settings, part or BatchPart())):
        yield


def _attend(
    settings: Augmentation,
    part: BatchPart,
    layer: DecoderAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: QueryPrior,
    document_ids: Tensor | None,
) -> Tensor:
    if not layer.training or layer.temperature is None:
        return DecoderAttention.attend(layer, q, k, v, prior, document_ids)
    scale = layer.temperature if settings.temperature_jitter is None else _jittered(layer, settings, part, len(q))
    out = DecoderAttention.attend(layer, q, k, v, prior, document_ids, query_scale=scale)
    if not settings.in_batch_negatives or not layer.temperature.grows_with_length.any():
        return out
    if document_ids is not None and (document_ids < 0).any():
        raise ValueError("in-batch negatives and padding do not go together; pack the documents")
    size = 2 ** int(torch.randint(min(settings.in_batch_negatives + 1, len(k)).bit_length(), ()))
    return out if size == 1 else _with_negatives(layer, scale, size, out, q, k, v, prior, document_ids)


def _jittered(layer: DecoderAttention, settings: Augmentation, part: BatchPart, own: int) -> Callable[[Tensor], Tensor]:
    """Scalable Softmax whose temperatures, in half of the sequences, are multiplied by a factor from a range.

    Every call draws a factor, uniformly in its logarithm: one for each layer, and one more for its negatives.
    """
    assert settings.temperature_jitter is not None
    temperature, (low, high) = layer.temperature, map(math.log, settings.temperature_jitter)
    assert temperature is not None

    def query_scale(counts: Tensor) -> Tensor:
        r = temperature(counts)
        factor = torch.empty(part.batch or own, 1, 1, device=r.device).uniform_(low, high).exp()
        factor = torch.where(torch.rand_like(factor) < 0.5, factor, 1.0)[part.first : part.first + own]
        return torch.where(temperature.grows_with_length[:, None], r * factor, r.expand(own, -1, -1))

    return query_scale


def _with_negatives(
    layer: DecoderAttention,
    query_scale: Callable[[Tensor], Tensor],
    size: int,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: QueryPrior,
    document_ids: Tensor | None,
) -> Tensor:
    """`out` with the attention of heads with Scalable Softmax, in the last quarter of each sequence, computed again.

    Groups of `size` sequences see the keys of the whole group. A key of another sequence gets the distance of the own
    key at the same position, so the prior cannot tell them apart. Sequences that fill no group stay as they are.
    """
    assert layer.temperature is not None
    assert isinstance(prior, Prior | GivenPrior)  # a recipe has no sinks with in-batch negatives
    heads, whole = layer.temperature.grows_with_length.nonzero().flatten(), len(k) // size * size
    late, members = (q.shape[2] + 3) // 4, q.shape[1] // k.shape[1]
    position = torch.arange(k.shape[2], device=k.device)
    distance = position[-late:, None] - position
    visible = (distance >= 0).expand(len(k), 1, -1, -1)
    if document_ids is not None:
        visible = visible & (document_ids[:, None, -late:, None] == document_ids[:, None, None])
    r = query_scale(size * visible_counts(late, k.shape[2], document_ids=document_ids, device=k.device))
    r = r.expand(len(k), -1, -1)[:, heads, :, None].float()
    by_head = prior.last(late).log_prior if isinstance(prior, GivenPrior) else prior
    log_prior = by_head(distance.clamp(min=0))[..., heads, :, :].float()
    visible = visible & ~log_prior.isneginf()
    log_prior = log_prior.masked_fill(log_prior.isneginf(), 0.0).expand(len(k), -1, -1, -1)
    # Scaling queries and prior, as the kernels do, is cheaper than scaling all logits.
    scaled_prior = r * log_prior if layer.scale_prior else log_prior

    def grouped(x: Tensor) -> Tensor:
        """[B, H, N, F] as [B / S, H, S N, F], without the sequences that fill no group."""
        return x[:whole].unflatten(0, (-1, size)).transpose(1, 2).flatten(2, 3)

    def for_all_keys(x: Tensor) -> Tensor:
        """[B, H, M, N] as [B / S, H, S M, S N]: the same for the keys of every sequence of the group."""
        return grouped(x).repeat(1, 1, 1, size)

    with torch.autocast(q.device.type, enabled=False):
        k, v = (grouped(x.repeat_interleave(members, 1)[:, heads].float()) for x in (k, v))
        content = grouped((q[:, heads, -late:] * (r / q.shape[-1] ** 0.5)).float()) @ k.mT
        posterior = softmax_posterior(content, for_all_keys(scaled_prior), for_all_keys(visible), None, False)
        mixed = (posterior @ v).unflatten(2, (size, -1)).transpose(1, 2).flatten(0, 1)
    last = out[:whole, :, -late:].index_copy(1, heads, mixed.to(out.dtype))
    last = torch.cat([last, out[whole:, :, -late:]])
    return torch.cat([out[:, :, :-late], last], 2)
