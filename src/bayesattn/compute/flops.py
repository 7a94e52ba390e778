"""Floating-point operations of training and inference; one multiply-add counts as two."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from bayesattn.compute.architecture import Architecture
from bayesattn.errors import UserError, shown


def matmul_flops(architecture: Architecture) -> int:
    """FLOPs of the forward pass of one token in matrix products with weights; attention is not included."""
    return 2 * (architecture.matmul_parameters + architecture.repeated)


def attention_flops(architecture: Architecture, length: int, *, causal: bool = True) -> float:
    """FLOPs of the forward pass of one token in attention (logits and weighted sum), averaged over `length` tokens.

    A causal query sees (length + 1) / 2 keys on average; without the causal mask it sees all of them.
    """
    visible = (length + 1) / 2 if causal else length
    return 4.0 * architecture.layers * architecture.heads * architecture.head_size * visible


def training_flops(
    architecture: Architecture,
    tokens: float,
    length: int,
    *,
    causal: bool = True,
    document: int | None = None,
    recompute: bool = False,
) -> float:
    """FLOPs of training on `tokens` tokens in sequences of `length`; a backward pass costs two forward passes.

    Args:
        document: length of the documents, if attention is masked to stay within them.
        recompute: whether the backward pass repeats the forward pass (activation checkpointing).
    """
    attended = length if document is None else min(document, length)
    forward = matmul_flops(architecture) + attention_flops(architecture, attended, causal=causal)
    return tokens * forward * (4 if recompute else 3)


@dataclass(frozen=True)
class Hardware:
    """Peak bfloat16 FLOPs per second without sparsity, and bytes of memory, from the vendor's data sheet."""

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
    """Hardware by its name."""
    if name not in HARDWARE:
        near = difflib.get_close_matches(name, HARDWARE, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(HARDWARE)}"
        raise UserError(f"there is no hardware {shown(name)}; {hint}")
    return HARDWARE[name]


def training_memory(
    architecture: Architecture, tokens: int, *, recompute: bool = False, element: int = 2
) -> dict[str, float]:
    """Bytes on one device that holds the whole model and `tokens` tokens at a time; activations are an estimate.

    Weights, gradients and the two moments of the optimizer are in float32. Activations have `element` bytes per number.
    Logits are held once with `element` bytes and twice in float32.
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
