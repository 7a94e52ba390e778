"""Floating-point operations of training and reading: a product and a sum are two."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from bayesattn.compute.architecture import Architecture
from bayesattn.errors import UserError


def matmul_flops(architecture: Architecture) -> int:
    """Of one token forward, without attention over others."""
    return 2 * (architecture.matmul_parameters + architecture.repeated)


def attention_flops(architecture: Architecture, length: int, *, causal: bool = True) -> float:
    """Of one token forward, on average over a sequence of `length`: the logits and the mixing of values.

    A causal query sees half of the keys and half a key more, on average; not causal, all of them.
    """
    seen = (length + 1) / 2 if causal else length
    return 4.0 * architecture.layers * architecture.heads * architecture.head_size * seen


def training_flops(
    architecture: Architecture,
    tokens: float,
    length: int,
    *,
    causal: bool = True,
    document: int | None = None,
    recompute: bool = False,
) -> float:
    """Of training on so many tokens in sequences of `length`; the backward pass is twice the forward one.

    Args:
        document: tokens that attention is limited to, if documents are masked from each other.
        recompute: whether the forward pass is done again in the backward one, as activation checkpointing does.
    """
    seen = length if document is None else min(document, length)
    forward = matmul_flops(architecture) + attention_flops(architecture, seen, causal=causal)
    return tokens * forward * (4 if recompute else 3)


@dataclass(frozen=True)
class Hardware:
    """Peak operations a second in bfloat16 without sparsity, and memory, as the maker states them."""

    name: str
    flops: float
    memory: float


HARDWARE = {
    card.name: card
    for card in (
        Hardware("h100", 989e12, 80e9),
        Hardware("h200", 989e12, 141e9),
        Hardware("b200", 2250e12, 180e9),
        Hardware("a100", 312e12, 80e9),
        Hardware("l40s", 362e12, 48e9),
        Hardware("rtx4090", 165e12, 24e9),
        Hardware("l4", 121e12, 24e9),
        Hardware("t4", 65e12, 16e9),
        Hardware("mi300x", 1307e12, 192e9),
    )
}


def find_hardware(name: str) -> Hardware:
    """By its name."""
    if name not in HARDWARE:
        near = difflib.get_close_matches(name, HARDWARE, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(HARDWARE)}"
        raise UserError(f"there is no hardware {name!r}; {hint}")
    return HARDWARE[name]


def training_memory(
    architecture: Architecture, tokens: int, *, recompute: bool = False, element: int = 2
) -> dict[str, float]:
    """Bytes on one device that holds the whole model, with `tokens` at a time; activations are an estimate.

    Weights, gradients and two moments of the optimizer in float32, activations in numbers of `element` bytes;
    logits once in these and twice in float32.
    """
    a = architecture
    projections = (2 * a.heads + 2 * a.kv_heads) * a.head_size
    layer = element * (4 * a.hidden + projections + (4 if a.gated else 3) * a.ffn)
    kept = a.layers * element * a.hidden + layer if recompute else a.layers * layer
    return {
        "weights": 4.0 * a.parameters,
        "gradients": 4.0 * a.parameters,
        "optimizer": 8.0 * a.parameters,
        "activations": float(tokens * kept),
        "logits": tokens * a.vocabulary * (element + 8.0),
    }
