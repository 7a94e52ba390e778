"""How much context each head of a model makes use of, and the model with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.convergence.bridge import effective_tokens
from bayesattn.convergence.layers import Layer, read_layers
from bayesattn.errors import UserError
from bayesattn.models.modeling import BamForCausalLM

QUERIES = 32
SHORTEST = 16
# Of the queries, for which leaving more away must change little.
MOST = 0.95


@dataclass(frozen=True)
class Head:
    """One head at a length.

    Args:
        kind: of its prior; empty without one.
        prior_effective: tokens its prior counts on, 1/Σp²; and by which factor that grew over the second half of the
            length, 2 for a prior without preferences, 1 for one that has seen all it wants.
        effective: the same of its attention, content included: the median over queries.
        reach: tokens before a query that are enough, its layer's inputs being what they are: more change the output by
            less than δ (in units of the largest value) for 95% of the last queries. The length itself if only all of it
            is enough.
        certain: tokens beyond which prior and bound on the content prove that; None if they do not.
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
    """Heads, and what they come to: through a layer a token sees as far as its farthest head, and layers add up.

    All but those that look at the same states, the last `reading` ones: of them the farthest counts, and a key may be
    of a token `hindsight` before.
    """

    length: int
    delta: float
    heads: list[Head]
    reading: int = 1
    hindsight: int = 0

    @property
    def usable(self) -> int:
        """Tokens that can matter to the last one: the farthest reach of each layer, added up."""
        farthest: dict[int, int] = {}
        for head in self.heads:
            farthest[head.layer] = max(head.reach, farthest.get(head.layer, 0))
        layers = [farthest[layer] for layer in sorted(farthest)]
        return min(self.length, sum(layers[: -self.reading]) + max(layers[-self.reading :]) + self.hindsight)

    def __str__(self) -> str:
        local = [head for head in self.heads if head.reach < self.length]
        count = f"{len(local)} of {len(self.heads)} heads need no more than "
        told = f"{count}{max(head.reach for head in local):,} of {self.length:,} tokens. " if local else ""
        rest = len(self.heads) - len(local)
        if rest:
            told += f"{rest} of {len(self.heads)} still change with the last half: "
            return f"{told}use all {self.length:,}, and try more."
        if self.usable < self.length:
            return f"{told}Through all layers that is {self.usable:,}: more changes next to nothing on this text."
        return f"{told}Through all layers that is all of them: try more."

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "delta": self.delta,
            "usable": self.usable,
            "heads": [head.to_dict() for head in self.heads],
        }


@torch.no_grad()
def advise(model: Any, ids: Tensor, delta: float = 0.01) -> Advice:
    """Per head how many tokens of a text `[1, N]` matter at its end, and beyond which none does."""
    if not 1e-6 <= delta < 2:
        raise UserError(f"delta is {delta}; a change between 1e-6 and 2 (of the largest value) is needed")
    length = ids.shape[1]
    if length < 4 * QUERIES:
        raise UserError(f"advice is asked for {length} tokens; at least {4 * QUERIES} are needed")
    layers = read_layers(model, ids)
    if any(layer.visible is not None and layer.visible[0].sum() > 1 for layer in layers):
        raise UserError(
            "this model sees what comes after a token too; advice is for those that read from left to right"
        )
    certain = _certain(model, ids, layers, delta)
    found = []
    for layer in layers:
        effective, reach = _measured(layer, delta)
        kinds: Sequence[str] = [""] * len(effective)
        tables = None
        if layer.prior is not None and layer.temperature is not None:
            kinds = layer.prior.kinds()
            tables = layer.prior.log_probability(length) * layer.temperature[:, None].double().cpu()
        for head in range(len(effective)):
            half, whole = (None, None) if tables is None else effective_tokens(tables[head], [length // 2, length])
            found.append(
                Head(
                    layer=layer.number,
                    head=head,
                    kind=kinds[head],
                    prior_effective=whole,
                    prior_growth=None if whole is None or half is None else whole / half,
                    effective=effective[head],
                    reach=reach[head],
                    certain=certain[layer.number][head],
                )
            )
    config = model.config
    return Advice(length, delta, found, getattr(config, "reading_layers", 1), getattr(config, "hindsight", 0))


def _measured(layer: Layer, delta: float) -> tuple[list[float], list[int]]:
    """Effective tokens and reach of each head, over the last queries of the text."""
    length = layer.q.shape[1]
    # Doubling, so that a reach of the length means the last half matters.
    contexts = [length // 2**power for power in range((length // SHORTEST).bit_length() - 1, 0, -1)]
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
    change = torch.stack(changes).quantile(MOST, dim=0)  # [contexts, heads]
    reach = []
    for head in range(change.shape[1]):
        # The first context from which on all longer ones are near enough too.
        too_far = (change[:, head] > delta).nonzero()
        first = int(too_far[-1]) + 1 if len(too_far) else 0
        reach.append(contexts[first] if first < len(contexts) else length)
    return torch.stack(effective).median(0).values.tolist(), reach


def _certain(model: Any, ids: Tensor, layers: Sequence[Layer], delta: float) -> list[list[int | None]]:
    """Spans that the cache proves: without posterior mass of δ/2 an output changes by at most δ."""
    if not isinstance(model, BamForCausalLM):
        return [[None] * len(layer.q) for layer in layers]
    cache = model.make_cache(delta / 2)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return [
        [span for span in kept.spans for _ in range(len(layer.q) // len(kept.spans))]
        for kept, layer in zip(cache.caches, layers, strict=True)
    ]
