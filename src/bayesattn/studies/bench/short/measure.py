"""Attention of short contexts next to plain SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.studies.bench.inputs import LARGEST_ERROR, Inputs, Shape, error, training
from bayesattn.studies.bench.measure import environment, seconds_in_turn
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase
from bayesattn.studies.bench.short.run import Timing

# Matrix products of attention: logits and output; and backward the logits again, and a gradient of each factor.
PRODUCTS = {FORWARD: 2, TRAINING: 7}
# Rows and columns of the matrices whose product stands for the machine's rate.
MATRIX = 2048
MOST_ROUNDS, GEMM_ROUNDS = 30, 5


def sizes(shapes: Sequence[Shape], seed: int) -> dict[str, object]:
    """Shapes, seed, software and hardware of the measurement."""
    return {"shapes": [str(shape) for shape in shapes], "seed": seed, **environment(MOST_ROUNDS)}


def measure(shapes: Sequence[Shape], seed: int = 0) -> Iterator[list[Timing]]:
    """Measure; yields the rows of one shape at a time."""
    for shape in shapes:
        yield [_measure(shape, phase, seed) for phase in (FORWARD, TRAINING)]


def _measure(shape: Shape, phase: Phase, seed: int) -> Timing:
    inputs = Inputs.make(shape, seed)

    def plain() -> Tensor:
        grouped = shape.key_heads < shape.heads
        return scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=grouped)

    wrong_by = error(inputs.attend, inputs, scaled=True, gradients=phase == TRAINING)
    work: dict[str, Callable[[], Tensor]] = {"plain": plain}
    if correct := wrong_by <= LARGEST_ERROR:
        work["ours"] = inputs.attend
    if phase == TRAINING:
        seconds = seconds_in_turn({name: training(attend, inputs) for name, attend in work.items()}, MOST_ROUNDS)
    else:
        seconds = seconds_in_turn({name: torch.no_grad()(attend) for name, attend in work.items()}, MOST_ROUNDS)
    if not correct:
        note = f"wrong by {wrong_by:.1e}, not timed"
        return Timing(str(shape), phase, None, seconds["plain"], None, None, wrong_by, note)
    flops = 2 * PRODUCTS[phase] * inputs.visible_pairs() * shape.heads * shape.head_size
    ratio = seconds["ours"] / seconds["plain"]
    return Timing(
        str(shape), phase, seconds["ours"], seconds["plain"], ratio, flops / seconds["ours"] / gemm_rate(), wrong_by
    )


def gemm_rate() -> float:
    """FLOPs a second of a large matrix product; measured apart, because it would empty the caches for the next."""
    left, right = torch.randn(2, MATRIX, MATRIX)
    return 2 * MATRIX**3 / seconds_in_turn({"gemm": lambda: left @ right}, GEMM_ROUNDS)["gemm"]
