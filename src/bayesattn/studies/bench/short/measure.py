"""Attention of short contexts, as training has them, against plain SDPA: `bayesattn bench short`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn import files
from bayesattn.studies.bench.inputs import LARGEST_ERROR, Inputs, Shape, error, training
from bayesattn.studies.bench.measure import environment, seconds_in_turn

FORWARD, TRAINING = "forward", "forward + backward"
# Matrix products of attention: logits and output; and backward the logits again, and a gradient of each factor.
PRODUCTS = {FORWARD: 2, TRAINING: 7}
# Rows and columns of the matrices whose product stands for the machine's rate.
MATRIX = 2048
MOST_ROUNDS, GEMM_ROUNDS = 30, 5
SHAPES = (
    "16x4x128x32,16x4x128x32/4,16x8x128x64,16x8:2x128x64,16x8x128x64/4,2x8x512x64,2x8:2x512x64,2x8x512x64/4,"
    "2x8x1024x64,1x8x2048x64,1x8x4096x64"
)


@dataclass(frozen=True)
class Settings:
    """Shapes to measure, and the seed of the random inputs."""

    shapes: tuple[Shape, ...] = tuple(Shape.parse(text) for text in SHAPES.split(","))
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One phase of one shape.

    Args:
        shape: as `Shape.parse` reads it.
        seconds: time of our attention with prior and Scalable Softmax, in training with the gradients of all five
            inputs; None if it is wrong.
        plain_seconds: time of plain causal SDPA, without prior, scale and documents.
        ratio: the first over the second.
        gemm_share: share of the machine's rate of matrix products that the visible half of the logits takes.
        error: largest relative error against the float64 reference.
    """

    shape: str
    phase: str
    seconds: float | None
    plain_seconds: float
    ratio: float | None
    gemm_share: float | None
    error: float
    note: str = ""


def run(settings: Settings) -> Iterator[list[Row]]:
    """Measure; yields the rows of one shape at a time."""
    for shape in settings.shapes:
        yield [_measure(shape, phase, settings.seed) for phase in (FORWARD, TRAINING)]


def to_json(rows: Sequence[Row], settings: Settings) -> str:
    shapes = [str(shape) for shape in settings.shapes]
    content = {"shapes": shapes, "seed": settings.seed, **environment(MOST_ROUNDS)}
    return files.to_json({"settings": content, "rows": [asdict(row) for row in rows]}, indent=2)


def _measure(shape: Shape, phase: str, seed: int) -> Row:
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
        return Row(str(shape), phase, None, seconds["plain"], None, None, wrong_by, note)
    flops = 2 * PRODUCTS[phase] * inputs.visible_pairs() * shape.heads * shape.head_size
    ratio = seconds["ours"] / seconds["plain"]
    return Row(
        str(shape), phase, seconds["ours"], seconds["plain"], ratio, flops / seconds["ours"] / gemm_rate(), wrong_by
    )


def gemm_rate() -> float:
    """FLOPs a second of a large matrix product; measured apart, because it would empty the caches for the next."""
    left, right = torch.randn(2, MATRIX, MATRIX)
    return 2 * MATRIX**3 / seconds_in_turn({"gemm": lambda: left @ right}, GEMM_ROUNDS)["gemm"]
