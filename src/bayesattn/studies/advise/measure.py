"""How much context each head of a model uses, and how much the whole model uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesattn.errors import UserError
from bayesattn.studies.advise.run import Advice, Head
from bayesattn.studies.convergence.layers import Layer, read_layers
from bayesattn.studies.convergence.prior.measure import effective_tokens

# The last queries of the text, on which heads are measured.
QUERIES = 32
SHORTEST_CONTEXT = 16
# A context is enough if it is enough for this share of the queries.
QUANTILE = 0.95


@torch.no_grad()
def advise(model: Any, ids: Tensor, delta: float = 0.01, name: str = "this model", sinks: int = 0) -> Advice:
    """For each head, how many of the last tokens of a text `[1, N]` change its output at the end of the text.

    Args:
        sinks: first tokens that stay visible whatever the context.
        delta: smallest change of an output that counts, in units of the largest value.
        name: what errors call the model.
    """
    if not 1e-6 <= delta < 2:
        raise UserError(f"delta is {delta}; it must be at least 1e-6 and less than 2")
    length = ids.shape[1]
    if length < 4 * QUERIES:
        raise UserError(f"the length is {length} tokens; at least {4 * QUERIES} are needed")
    layers = read_layers(model, ids, name)
    if any(layer.visible is not None and layer.visible[0].sum() > 1 for layer in layers):
        raise UserError(f"{name} attends to later tokens too; advice is only for causal models")
    proven = _proven_reach(model, ids, layers, delta)
    heads = []
    for layer in layers:
        effective, reach = _measure(layer, delta, sinks)
        kinds: Sequence[str] = [""] * len(effective)
        tables = None
        if layer.prior is not None and layer.temperature is not None:
            kinds = layer.prior.kinds()
            tables = layer.prior.log_probability(length) * layer.temperature[:, None].double().cpu()
        for head in range(len(effective)):
            half, whole = (None, None) if tables is None else effective_tokens(tables[head], [length // 2, length])
            heads.append(
                Head(
                    layer=layer.number,
                    head=head,
                    kind=kinds[head],
                    prior_effective=whole,
                    prior_growth=None if whole is None or half is None else whole / half,
                    effective=effective[head],
                    reach=reach[head],
                    certain=proven[layer.number][head],
                )
            )
    return Advice(
        length=length,
        delta=delta,
        usable=usable_context(
            heads, length, getattr(model.config, "cross_layers", 1), getattr(model.config, "key_delay", 0)
        ),
        heads=heads,
        model=name,
        training_length=getattr(model.config, "training_length", None),
        sinks=sinks or None,
    )


def usable_context(heads: Sequence[Head], length: int, cross_layers: int = 1, key_delay: int = 0) -> int:
    """The sum of the farthest reach of each layer.

    The last `cross_layers` layers read the same states, so of these only the farthest counts. A key may depend on a
    token `key_delay` before its own.
    """
    farthest: dict[int, int] = {}
    for head in heads:
        farthest[head.layer] = max(head.reach, farthest.get(head.layer, 0))
    layers = [farthest[layer] for layer in sorted(farthest)]
    return min(length, sum(layers[:-cross_layers]) + max(layers[-cross_layers:]) + key_delay)


def _measure(layer: Layer, delta: float, sinks: int) -> tuple[list[float], list[int]]:
    """Effective tokens and reach of each head, over the last queries of the text."""
    length = layer.q.shape[1]
    # Contexts double, so a reach of the whole length means that the farther half of the tokens counts.
    contexts = [length // 2**power for power in range((length // SHORTEST_CONTEXT).bit_length() - 1, 0, -1)]
    largest = layer.v.norm(dim=-1).amax(-1)
    effective, changes = [], []
    for position in range(length - QUERIES, length):
        logits = torch.einsum("hd,hnd->hn", layer.q[:, position], layer.k[:, : position + 1]).flip(-1)
        if layer.prior is not None and layer.temperature is not None:
            table = layer.prior(torch.arange(position + 1)) * layer.temperature[:, None]
            if layer.sinks is not None:
                table[:, position + 1 - layer.sinks.shape[1] :] = (layer.sinks * layer.temperature[:, None]).flip(-1)
            logits += table.to(logits)
        if layer.visible is not None:
            logits = logits.masked_fill(~layer.visible[position, : position + 1].flip(-1), -torch.inf)
        weights = logits.softmax(-1)
        values = layer.v[:, : position + 1].flip(1)
        whole = torch.einsum("hn,hnd->hd", weights, values)
        effective.append(1 / (weights**2).sum(-1))
        parts = []
        for n in contexts:
            kept = weights.clone()
            kept[:, n : max(n, position + 1 - sinks)] = 0.0
            parts.append(torch.einsum("hn,hnd->hd", kept, values) / kept.sum(-1, keepdim=True).clamp(min=1e-30))
        changes.append(torch.stack([(part - whole).norm(dim=-1) / largest for part in parts]))
    change = torch.stack(changes).quantile(QUANTILE, dim=0)  # [contexts, heads]
    reach = []
    for head in range(change.shape[1]):
        # The shortest context such that it and all longer ones are enough.
        too_short = (change[:, head] > delta).nonzero()
        first = int(too_short[-1]) + 1 if len(too_short) else 0
        reach.append(contexts[first] if first < len(contexts) else length)
    return torch.stack(effective).median(0).values.tolist(), reach


def _proven_reach(model: Any, ids: Tensor, layers: Sequence[Layer], delta: float) -> list[list[int | None]]:
    """Spans that the pruning cache proves: an output that loses posterior mass δ/2 changes by at most δ."""
    if not hasattr(model, "make_cache"):
        return [[None] * len(layer.q) for layer in layers]
    cache = model.make_cache(delta / 2)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return [
        [span for span in layer_cache.spans for _ in range(len(layer.q) // len(layer_cache.spans))]
        for layer_cache, layer in zip(cache.caches, layers, strict=True)
    ]
