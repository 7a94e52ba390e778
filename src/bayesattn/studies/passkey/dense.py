"""Reading with dense attention, every logit and bias written out: the peer of pruning and the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from bayesattn.attention import bayesian_attention
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import Task
from bayesattn.models.attention import DecoderAttention, QueryPrior, attend_with
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.priors import GivenPrior, GivenSinks, Prior
from bayesattn.schemas import Row

# Attention logits that are written out at a time.
ELEMENTS = 2**22


@dataclass(frozen=True)
class Comparison(Row):
    """Seconds to the first token of an answer, pruned and dense, and the largest difference of their logits."""

    derived: ClassVar[tuple[str, ...]] = ("ratio",)

    length: int
    seconds: float
    dense_seconds: float
    error: float

    @property
    def ratio(self) -> float:
        return self.dense_seconds / self.seconds


def check(reader: Reader) -> None:
    """A model that cannot be compared raises an error."""
    if not isinstance(reader.model, DecoderForCausalLM):
        raise UserError(f"{reader.name} is a {type(reader.model).__name__}; the dense comparison needs a model of ours")


@torch.inference_mode()
def compare(reader: Reader, task: Task, length: int, seed: int = 0, elements: int = ELEMENTS) -> Comparison:
    """Read one prompt both ways, the pruned way once more before to warm up; `elements` of logits at a time."""
    check(reader)
    model = reader.model
    prompt = task.prompts(reader)(Random(f"{seed} {task.seed_key} {length} 0"), length, None)
    ids = torch.tensor([prompt.ids], device=model.device)

    def read() -> Tensor:
        return model(input_ids=ids, past_key_values=model.make_cache(), logits_to_keep=1).logits[0, -1]

    with reader.checked_model():
        read()
        begin = time.perf_counter()
        logits = read()
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        dense = dense_logits(model, ids, elements)
        dense_seconds = time.perf_counter() - begin
    return Comparison(length, seconds, dense_seconds, (logits - dense).abs().max().item())


def dense_logits(model: DecoderForCausalLM, ids: Tensor, elements: int = ELEMENTS) -> Tensor:
    """Logits of the last position, from all rows of all layers; `elements` of attention logits at a time."""
    layers = [layer.self_attn for layer in model.model.layers]

    def attend(
        attention: DecoderAttention, q: Tensor, k: Tensor, v: Tensor, prior: QueryPrior, document_ids: Tensor | None
    ) -> Tensor:
        if attention in layers:
            return _attend_densely(attention, q, k, v, prior, elements)
        return DecoderAttention.attend(attention, q, k, v, prior, document_ids)

    with attend_with(model, attend):
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(states[:, -1])[0]


def _attend_densely(
    attention: DecoderAttention, q: Tensor, k: Tensor, v: Tensor, prior: QueryPrior, elements: int
) -> Tensor:
    n = k.shape[2]
    # A table that all blocks share is faster than a prior.
    shared = prior(torch.arange(n, device=k.device)) if isinstance(prior, Prior) else prior
    step = max(1, elements // (q.shape[1] * n))
    parts = []
    for first in range(0, n, step):
        last = min(n, first + step)
        parts.append(
            bayesian_attention(
                q[:, :, first:last],
                k[:, :, :last],
                v[:, :, :last],
                prior.queries(slice(first, last)) if isinstance(prior, GivenPrior | GivenSinks) else shared,
                query_scale=attention.temperature,
                scale_prior=attention.scale_prior,
                softmax_scale=attention.softmax_scale,
                implementation="blockwise",  # computes every logit of so few rows, in fewer passes than the reference
            )
        )
    return torch.cat(parts, 2)
