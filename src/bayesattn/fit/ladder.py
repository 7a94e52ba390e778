"""What a key/value head gives for its queries under each of several windows.

Shape letters: R query heads of one key/value head, M queries, N keys, D head size, E value size, W windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The narrowest window of a ladder.
NARROWEST = 32
# From this share of the length on, the steps of a ladder are halved: budgets are decided there.
FINE_FROM = 16


def make_ladder(length: int) -> list[int]:
    """Widths that are worth a measurement at a length: doubled each time, and times 3/2 as well from a sixteenth on.

    The widest is three quarters of the length: a wider one frees little.
    """
    widths, width = {length * 3 // 4}, NARROWEST
    while width <= length // 2:
        widths |= {width, width * 3 // 2} if width * FINE_FROM >= length else {width}
        width *= 2
    return sorted(widths)


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
