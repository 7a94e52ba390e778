"""What it costs a model if a head sees only its last keys, measured layer by layer while the model reads texts.

The price of a window is the mean of ‖Δ‖² / (‖h‖·‖h'‖). Δ is the change of what attention adds to the hidden state h, if
the query heads of one key/value head see a window and the sinks instead of all keys; h' is what the layer makes of h.
All inputs are frozen: they are those of the model without windows.

The layer normalises h + Δ for its second half, and later layers normalise what comes of h', so a relative change is
what they see. The two norms differ by a factor of 16 in the first layer of some models, and hardly elsewhere; with
their mean the prices of all layers compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesattn.errors import UserError
from bayesattn.fit.contexts import Context
from bayesattn.fit.ladder import attention_shape, outputs_by_width
from bayesattn.fit.price_files import HeadPrices, Prices
from bayesattn.fit.reading import LayerInput, check_readable, read

# Numbers of each parameter that the fingerprint of a model looks at.
SAMPLED = 64
# Of prices, after the point. One in a hundred million is nothing to a model.
DIGITS = 9
# Called with what is measured, how many layers of all contexts are done, and of how many.
Step = Callable[[str, int, int], object]


def stability(prices: Prices, recall_share: float) -> float | None:
    """Spearman's rank correlation of the prices of heads between two halves of the contexts; None for one context.

    It is that of the middle window, where prices of heads differ most.
    """
    if len(prices.contexts) < 2:
        return None
    middle = len(prices.widths) // 2
    halves = [replace(prices, contexts=prices.contexts[start::2]).of_heads(recall_share) for start in (0, 1)]
    ranks = [torch.tensor([half[head][middle] for head in sorted(half)]).argsort().argsort() for half in halves]
    return float(torch.corrcoef(torch.stack(ranks).double())[0, 1]) if len(ranks[0]) > 1 else None


def measure_prices(
    model: Any,
    contexts: Sequence[Context],
    widths: Sequence[int],
    sinks: int,
    *,
    before: Prices | None = None,
    keep: Callable[[Prices], object] | None = None,
    step: Step | None = None,
    clock: Callable[[], float] | None = None,
) -> Prices:
    """Prices of these windows for every head of a model, on every context.

    Args:
        before: prices of the same measurement that was stopped; what they have is not measured again.
        keep: called with the prices so far after every layer.
        step: called as it goes on.
        clock: what counts the seconds.
    """
    layers = check_readable(model)
    blank = Prices(
        fingerprint=fingerprint_of(model), texts=hash_of(contexts), length=len(contexts[0].ids), sinks=sinks,
        widths=list(widths), contexts=[[] for _ in contexts],
    )  # fmt: skip
    result = blank if before is None else before
    if result.fingerprint != blank.fingerprint:
        raise UserError(other_model(model))
    if replace(result, contexts=blank.contexts, finished=False, seconds=0.0) != blank:
        raise UserError(
            f"the prices are of {result.length:,} tokens of a text with {result.sinks} sinks, and something of that is "
            "different now; measure again in a new file"
        )
    started, spent = clock() if clock else 0.0, result.seconds
    for number, context in enumerate(contexts):
        done = {head.layer for head in result.contexts[number]}

        def visit(layer: LayerInput, number: int = number, context: Context = context, done: set[int] = done) -> None:
            nonlocal result
            if step is not None:
                step(f"text {number + 1} of {len(contexts)}, layers", number * len(layers) + layer.number,
                     len(contexts) * len(layers))  # fmt: skip
            if layer.number in done:
                return
            made = [price_head(layer, head, context, widths, sinks) for head in range(len(layer.k))]
            rows = [[*each, *made] if place == number else each for place, each in enumerate(result.contexts)]
            seconds = spent + (clock() - started if clock else 0.0)
            result = replace(result, contexts=rows, seconds=seconds)
            if keep is not None:
                keep(result)

        if len(done) < len(layers):
            read(model, context.ids, visit)
    if not result.contexts[0]:
        raise UserError(f"every layer of {type(model).__name__} has a sliding window already, so there is none to fit")
    result = replace(result, finished=True)
    if keep is not None:
        keep(result)
    return result


def price_head(layer: LayerInput, head: int, context: Context, widths: Sequence[int], sinks: int) -> HeadPrices:
    """The prices of windows for one key/value head of a layer."""
    rows, texts = torch.cat([context.text_rows, context.recall_rows]), len(context.text_rows)
    rows = rows.to(layer.q.device)
    q = layer.q[head * layer.group : (head + 1) * layer.group, rows]
    k, v = layer.k[head], layer.v[head]
    outputs = outputs_by_width(q, k, v, rows, widths, sinks, layer.scaling)
    change = layer.project(outputs[:-1] - outputs[-1], head)  # [W, M, C]
    sizes = [torch.linalg.vector_norm(states[rows].float(), dim=-1) for states in (layer.before, layer.after)]
    both = sizes[0] * sizes[1]
    # A state of zeros, which the embedding of padding is, has no size to compare with.
    relative = (change.square().sum(-1) / both).where(both > 0, 0.0).double()
    on_sinks, reach = attention_shape(q[:, :texts], k, rows[:texts], sinks, layer.scaling)
    return HeadPrices(
        layer=layer.number,
        head=head,
        text=[round(price, DIGITS) for price in relative[:, :texts].mean(-1).tolist()],
        recall=[round(price, DIGITS) for price in relative[:, texts:].mean(-1).tolist()],
        on_sinks=round(on_sinks, 4),
        reach=round(reach, 1),
    )


def other_model(model: Any) -> str:
    """The sentence for prices that do not fit a model."""
    return f"the prices are of another model than this {type(model).__name__}; measure again without them"


def fingerprint_of(model: Any) -> str:
    """A hash of the names, the shapes and some numbers of a model's weights."""
    digest = hashlib.sha256()
    for name, weights in model.named_parameters():
        some: Tensor = weights.detach().flatten()[:: max(1, weights.numel() // SAMPLED)]
        digest.update(f"{name} {list(weights.shape)}".encode())
        digest.update(some.cpu().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_of(contexts: Sequence[Context]) -> str:
    """A hash of the tokens of contexts."""
    digest = hashlib.sha256()
    for context in contexts:
        digest.update(context.ids.numpy().tobytes())
    return digest.hexdigest()[:16]
