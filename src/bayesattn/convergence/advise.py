"""How much context each head of a model uses, and how much the whole model uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.convergence.effective_tokens import effective_tokens
from bayesattn.convergence.layers import Layer, read_layers
from bayesattn.errors import UserError
from bayesattn.models.bam.modeling import BamForCausalLM

# The last queries of the text, on which heads are measured.
QUERIES = 32
SHORTEST_CONTEXT = 16
# A context is enough if it is enough for this share of the queries.
QUANTILE = 0.95


@dataclass(frozen=True)
class Head:
    """One head, measured at one length.

    Args:
        kind: kind of its prior; empty without a prior.
        prior_effective: effective tokens of its prior, 1/Σp².
        prior_growth: factor by which `prior_effective` grows over the second half of the length. It is 2 for a uniform
            prior and 1 for a prior whose mass all lies in the first half.
        effective: effective tokens of its attention, content included: the median over queries.
        reach: number of tokens before a query that are enough for this head, with the layer's inputs held fixed. More
            tokens change the output by less than δ (in units of the largest value) for 95% of the last queries. It is
            the length itself if no shorter context is enough.
        certain: number of tokens for which the prior and a bound on the content prove this; None without a proof.
    """

    layer: int
    head: int
    kind: str
    prior_effective: float | None
    prior_growth: float | None
    effective: float
    reach: int
    certain: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Advice:
    """All heads, and the context that the model can use.

    Through one layer a token sees as far as the farthest head of that layer, and the layers add up. The last
    `cross_layers` layers read the same states, so of these only the farthest counts. A key may depend on a token
    `key_delay` before its own.
    """

    length: int
    delta: float
    heads: list[Head]
    cross_layers: int = 1
    key_delay: int = 0

    @property
    def usable(self) -> int:
        """Number of tokens that can change the last output: the sum of the farthest reach of each layer."""
        farthest: dict[int, int] = {}
        for head in self.heads:
            farthest[head.layer] = max(head.reach, farthest.get(head.layer, 0))
        layers = [farthest[layer] for layer in sorted(farthest)]
        return min(self.length, sum(layers[: -self.cross_layers]) + max(layers[-self.cross_layers :]) + self.key_delay)

    def __str__(self) -> str:
        local = [head for head in self.heads if head.reach < self.length]
        count = f"{len(local)} of {len(self.heads)} heads need no more than "
        summary = f"{count}{max(head.reach for head in local):,} of {self.length:,} tokens. " if local else ""
        rest = len(self.heads) - len(local)
        if rest:
            summary += f"{rest} of {len(self.heads)} still change with the last half: "
            return f"{summary}use all {self.length:,}, and try more."
        if self.usable < self.length:
            return (
                f"{summary}Through all layers that is {self.usable:,}: more tokens change almost nothing on this text."
            )
        return f"{summary}Through all layers that is all of them: try more."

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "delta": self.delta,
            "usable": self.usable,
            "heads": [head.to_dict() for head in self.heads],
        }


@torch.no_grad()
def advise(model: Any, ids: Tensor, delta: float = 0.01, name: str = "this model") -> Advice:
    """For each head, how many of the last tokens of a text `[1, N]` change its output at the end of the text.

    Args:
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
        effective, reach = _measure(layer, delta)
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
    config = model.config
    return Advice(length, delta, heads, getattr(config, "cross_layers", 1), getattr(config, "key_delay", 0))


def _measure(layer: Layer, delta: float) -> tuple[list[float], list[int]]:
    """Effective tokens and reach of each head, over the last queries of the text."""
    length = layer.q.shape[1]
    # Contexts double, so a reach of the whole length means that the farther half of the tokens counts.
    contexts = [length // 2**power for power in range((length // SHORTEST_CONTEXT).bit_length() - 1, 0, -1)]
    largest = layer.v.norm(dim=-1).amax(-1)
    effective, changes = [], []
    for position in range(length - QUERIES, length):
        logits = torch.einsum("hd,hnd->hn", layer.q[:, position], layer.k[:, : position + 1]).flip(-1)
        if layer.prior is not None and layer.temperature is not None:
            logits += (layer.prior(torch.arange(position + 1)) * layer.temperature[:, None]).to(logits)
        if layer.visible is not None:
            logits = logits.masked_fill(~layer.visible[position, : position + 1].flip(-1), -torch.inf)
        weights = logits.softmax(-1)
        values = layer.v[:, : position + 1].flip(1)
        whole = torch.einsum("hn,hnd->hd", weights, values)
        effective.append(1 / (weights**2).sum(-1))
        parts = [
            torch.einsum("hn,hnd->hd", weights[:, :n], values[:, :n])
            / weights[:, :n].sum(-1, keepdim=True).clamp(min=1e-30)
            for n in contexts
        ]
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
    if not isinstance(model, BamForCausalLM):
        return [[None] * len(layer.q) for layer in layers]
    cache = model.make_cache(delta / 2)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return [
        [span for span in layer_cache.spans for _ in range(len(layer.q) // len(layer_cache.spans))]
        for layer_cache, layer in zip(cache.caches, layers, strict=True)
    ]
