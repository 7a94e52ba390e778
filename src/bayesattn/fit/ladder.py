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
# Queries at a time. They stand near each other, and then windows have few keys beside those of one query.
ROWS = 64


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
    parts = [
        _outputs_by_width(q, k_ND.float(), v_NE.float(), rows, widths, sinks)
        for q, rows in zip((q_RMD.float() * scaling).split(ROWS, 1), rows_M.split(ROWS), strict=True)
    ]
    return torch.cat(parts, 2)


def _outputs_by_width(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, widths: Sequence[int], sinks: int) -> Tensor:
    """The same for a few queries, for each window with the keys that one of them sees."""
    stop = int(rows.max()) + 1
    distance = rows[:, None] - torch.arange(stop, device=k.device)
    logits = (q @ k[:stop].T).masked_fill_(distance < 0, -math.inf)
    outs = []
    for width in widths:
        first = min(max(sinks, int(rows.min()) - width + 1), stop)
        near = logits[..., first:].masked_fill(distance[:, first:] >= width, -math.inf)
        weights = torch.cat([logits[..., :sinks], near], -1).softmax(-1)
        outs.append(weights @ torch.cat([v[: min(sinks, stop)], v[first:stop]]))
    outs.append(logits.softmax(-1) @ v[:stop])
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
