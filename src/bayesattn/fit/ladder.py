"""What a key/value head gives for its queries under each of several windows.

Shape letters: R query heads of one key/value head, M queries, N keys, D head size, E value size, W windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The narrowest window of a ladder; each further one is twice as wide.
NARROWEST = 32


def make_ladder(length: int) -> list[int]:
    """Widths that are worth a measurement at a length; the widest is three eighths of it.

    A cache that has read a prompt of the length gives memory back once half of it is unused.
    """
    widths, width = [], NARROWEST
    while width <= length // 4:
        widths.append(width)
        width *= 2
    return sorted({*widths, length * 3 // 8})


def outputs_by_width(
    q_RMD: Tensor, k_ND: Tensor, v_NE: Tensor, rows_M: Tensor, widths: Sequence[int], sinks: int, scaling: float
) -> Tensor:
    """Attention of the queries, which stand at `rows_M`, to their last `width` keys and the first `sinks` keys.

    Returns:
        `[W + 1, R, M, E]` in float32; the last is attention to all keys.
    """
    position = torch.arange(len(k_ND), device=k_ND.device)
    distance = rows_M[:, None] - position
    logits = (q_RMD.float() * scaling) @ k_ND.float().T
    logits = logits.masked_fill(distance < 0, -math.inf)
    values, outs = v_NE.float(), []
    for width in widths:
        hidden = (distance >= width) & (position >= sinks)
        outs.append(logits.masked_fill(hidden, -math.inf).softmax(-1) @ values)
    outs.append(logits.softmax(-1) @ values)
    return torch.stack(outs)


def attention_shape(q_RMD: Tensor, k_ND: Tensor, rows_M: Tensor, sinks: int, scaling: float) -> tuple[float, float]:
    """The share of attention on the first `sinks` keys, and the distance within which 90% of the other keys' share is.

    Both are means over queries and query heads.
    """
    position = torch.arange(len(k_ND), device=k_ND.device)
    distance = rows_M[:, None] - position
    weights = ((q_RMD.float() * scaling) @ k_ND.float().T).masked_fill(distance < 0, -math.inf).softmax(-1)
    on_sinks = weights[..., :sinks].sum(-1)
    others = weights[..., sinks:].flip(-1).cumsum(-1)  # from the last key back, zeros for keys after the query first
    enough = (others < 0.9 * others[..., -1:]).sum(-1) - (len(k_ND) - 1 - rows_M)
    return float(on_sinks.mean()), float((enough + 1).clamp(min=1).double().mean())
