"""What a schedule costs, which share of it the long contexts take, and what training short would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bayesattn.compute.architecture import Architecture
from bayesattn.compute.flops import Hardware, attention_flops, matmul_flops, training_flops
from bayesattn.compute.schedule import Stage
from bayesattn.errors import UserError


@dataclass(frozen=True)
class Row:
    """One stage, in three views.

    `flops_full` counts attention over whole squares, `flops_causal` what a causal query sees. `share_blog` is by the
    popular estimate tokens · length², with K as a thousand.
    """

    tokens: float
    length: int
    flops_full: float
    flops_causal: float
    share_full: float
    share_causal: float
    share_blog: float
    attention_share_full: float
    attention_share_causal: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Savings:
    """A schedule's cost and what it would be without long contexts.

    `dropped` is the share of FLOPs that leaving the long stages out saves, `short` that of training their tokens at the
    shortest length; both causal. Long stages are all that are longer than the shortest.
    """

    architecture: Architecture
    rows: list[Row]
    dropped: float
    short: float
    blog: float

    @property
    def flops(self) -> float:
        return sum(row.flops_causal for row in self.rows)

    def hours(self, hardware: Hardware, mfu: float) -> float:
        """Of one device."""
        if not 0 < mfu <= 1:
            raise UserError(f"the utilisation is {mfu}; it must be above 0 and at most 1")
        return self.flops / (hardware.flops * mfu) / 3600


def savings(
    architecture: Architecture, stages: Sequence[Stage], *, recompute: bool = False, document: int | None = None
) -> Savings:
    """Count a schedule; `document` limits attention to documents of so many tokens."""

    def flops(stage: Stage, length: int, causal: bool) -> float:
        return training_flops(architecture, stage.tokens, length, causal=causal, document=document, recompute=recompute)

    full = [flops(stage, stage.length, False) for stage in stages]
    causal = [flops(stage, stage.length, True) for stage in stages]
    blog = [stage.tokens * stage.decimal_length**2 for stage in stages]
    rows = []
    for number, stage in enumerate(stages):
        seen = stage.length if document is None else min(document, stage.length)
        shares = [
            attention_flops(architecture, seen, causal=c)
            / (attention_flops(architecture, seen, causal=c) + matmul_flops(architecture))
            for c in (False, True)
        ]
        rows.append(
            Row(
                tokens=stage.tokens,
                length=stage.length,
                flops_full=full[number],
                flops_causal=causal[number],
                share_full=full[number] / sum(full),
                share_causal=causal[number] / sum(causal),
                share_blog=blog[number] / sum(blog),
                attention_share_full=shares[0],
                attention_share_causal=shares[1],
            )
        )
    shortest = min(stage.length for stage in stages)
    long = [number for number, stage in enumerate(stages) if stage.length > shortest]
    at_short = sum(flops(stage, shortest, True) for stage in stages)
    return Savings(
        architecture=architecture,
        rows=rows,
        dropped=sum(causal[number] for number in long) / sum(causal),
        short=1 - at_short / sum(causal),
        blog=sum(blog[number] for number in long) / sum(blog),
    )


def short_saving(architecture: Architecture, length: int, short: int) -> float:
    """The share of training FLOPs saved by contexts of `short` instead of `length`, for the same tokens; causal."""
    cost = [training_flops(architecture, 1, n) for n in (length, short)]
    return 1 - cost[1] / cost[0]


@dataclass(frozen=True)
class Inference:
    """Reading a prompt and going on from it: all keys kept, or only what local heads can need."""

    length: int
    prefill_full: float
    prefill_kept: float
    kv_full: float
    kv_kept: float
    decode_bytes_full: float
    decode_bytes_kept: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inference(architecture: Architecture, length: int, *, local: float, span: int, element: int = 2) -> Inference:
    """FLOPs of a prompt, bytes of its keys and values, and bytes to read for every further token.

    Args:
        local: share of the heads that look at no more than `span` tokens (`bayesattn inspect` tells both).
        element: bytes of a number.
    """
    if not 0 <= local <= 1 or span < 1:
        raise UserError(f"{local} of the heads local within {span} tokens make no sense; 0 to 1, and at least 1 token")
    near = min(span, length)
    kept = (1 - local) + local * near / length
    attention = length * attention_flops(architecture, length)
    # A local query sees its span, or what there is before it.
    seen = (near * (near + 1) / 2 + (length - near) * near) / (length * (length + 1) / 2)
    matrices = float(length * matmul_flops(architecture))
    kv = float(length * architecture.kv_elements * element)
    weights = float(architecture.matmul_parameters * element)
    return Inference(
        length=length,
        prefill_full=matrices + attention,
        prefill_kept=matrices + attention * ((1 - local) + local * seen),
        kv_full=kv,
        kv_kept=kv * kept,
        decode_bytes_full=weights + kv,
        decode_bytes_kept=weights + kv * kept,
    )
