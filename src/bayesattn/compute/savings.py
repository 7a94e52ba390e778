"""What a training schedule costs, the share of its long contexts, and what training on short contexts saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bayesattn.compute.architecture import Architecture
from bayesattn.compute.costs import Inference, StageCost
from bayesattn.compute.flops import Hardware, attention_flops, matmul_flops, training_flops
from bayesattn.compute.schedule import MOST_LENGTH, Stage
from bayesattn.errors import UserError, is_number, is_whole, shown


@dataclass(frozen=True)
class Savings:
    """The cost of a schedule, and what it would be without long contexts.

    `dropped` is the share of causal FLOPs saved without the long stages. `short` is the share saved if their tokens are
    trained at the shortest length. Long stages are all stages longer than the shortest. `blog` is the share of the long
    stages by the popular estimate.
    """

    architecture: Architecture
    rows: list[StageCost]
    dropped: float
    short: float
    blog: float

    @property
    def flops(self) -> float:
        return sum(row.flops_causal for row in self.rows)

    def hours(self, hardware: Hardware, mfu: float) -> float:
        """Hours on one device; `mfu` is the share of its peak FLOPs that training reaches."""
        if not is_number(mfu) or not 0 < mfu <= 1:
            raise UserError(f"the utilisation is {shown(mfu)}; it must be above 0 and at most 1")
        return self.flops / (hardware.flops * mfu) / 3600


def savings(
    architecture: Architecture, stages: Sequence[Stage], *, recompute: bool = False, document: int | None = None
) -> Savings:
    """Count the cost of a schedule; `document` and `recompute` as in `training_flops`."""
    if not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise UserError(f"the stages are {shown(stages)}; at least one stage is needed, from schedule.parse")
    if document is not None and not is_whole(document, 1, MOST_LENGTH):
        raise UserError(f"documents have {shown(document)} tokens; 1 to {MOST_LENGTH:,} are allowed")

    def flops(stage: Stage, length: int, causal: bool) -> float:
        return training_flops(architecture, stage.tokens, length, causal=causal, document=document, recompute=recompute)

    full = [flops(stage, stage.length, False) for stage in stages]
    causal = [flops(stage, stage.length, True) for stage in stages]
    blog = [stage.tokens * stage.decimal_length**2 for stage in stages]
    rows = []
    for number, stage in enumerate(stages):
        attended = stage.length if document is None else min(document, stage.length)
        shares = [
            attention_flops(architecture, attended, causal=c)
            / (attention_flops(architecture, attended, causal=c) + matmul_flops(architecture))
            for c in (False, True)
        ]
        rows.append(
            StageCost(
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
    """The share of causal training FLOPs saved by contexts of `short` instead of `length`, for the same tokens."""
    cost = [training_flops(architecture, 1, n) for n in (length, short)]
    return 1 - cost[1] / cost[0]


def inference(architecture: Architecture, length: int, *, local: float, span: int, element: int = 2) -> Inference:
    """FLOPs of a prompt, bytes of its keys and values, and bytes read from memory to decode each further token.

    Args:
        local: share of the heads that look back at most `span` tokens (`bayesattn inspect` shows both).
        element: bytes per number.
    """
    if not is_number(local) or not 0 <= local <= 1:
        raise UserError(f"the share of local heads is {shown(local)}; 0 to 1 is allowed")
    if not is_whole(span, 1, MOST_LENGTH):
        raise UserError(f"the span of local heads is {shown(span)}; 1 to {MOST_LENGTH:,} tokens are allowed")
    if not is_whole(length, 1, MOST_LENGTH):
        raise UserError(f"the length is {shown(length)}; 1 to {MOST_LENGTH:,} tokens are allowed")
    near = min(span, length)
    kept = (1 - local) + local * near / length
    attention = length * attention_flops(architecture, length)
    # A query of a local head sees its span, or all tokens before it if there are fewer.
    visible_share = (near * (near + 1) / 2 + (length - near) * near) / (length * (length + 1) / 2)
    matrices = float(length * matmul_flops(architecture))
    kv = float(length * architecture.kv_elements * element)
    weights = float(architecture.matmul_parameters * element)
    return Inference(
        length=length,
        prefill_full=matrices + attention,
        prefill_kept=matrices + attention * ((1 - local) + local * visible_share),
        kv_full=kv,
        kv_kept=kv * kept,
        decode_bytes_full=weights + kv,
        decode_bytes_kept=weights + kv * kept,
    )
