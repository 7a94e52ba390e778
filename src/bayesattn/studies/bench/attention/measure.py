"""Attention with a prior against its peers: `bayesattn bench attention`.

`python -m bayesattn.studies.bench.attention.measure METHOD TOKENS SEED` prints the peak memory of one method;
METHOD is its index in `METHODS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bayesattn.compute.device import device_memory
from bayesattn.errors import first_line
from bayesattn.studies.bench.attention.run import BASELINE, Timing
from bayesattn.studies.bench.inputs import (
    CHECKED_QUERIES,
    LARGEST_ERROR,
    SHARE_OF_MEMORY,
    Attend,
    Inputs,
    Shape,
    error,
    training,
)
from bayesattn.studies.bench.measure import bytes_needed, environment, peak_bytes, peak_bytes_of, seconds_in_turn
from bayesattn.studies.bench.runs import FORWARD, TRAINING, Phase

HEADS, SIZE = 8, 64
# Memory per token of training with the leanest method, inputs included, rounded up.
BYTES_PER_TOKEN = 40_000


@dataclass(frozen=True)
class Method:
    """One implementation of attention.

    `matrices` is the number of tokens × tokens matrices that it holds per head, rounded up; 0 for linear memory.
    """

    name: str
    phase: Phase
    prepare: Callable[[Inputs], Attend]
    has_prior: bool = True
    has_scale: bool = False
    matrices: int = 0


def _ours(scaled: bool) -> Callable[[Inputs], Attend]:
    return lambda x: lambda: x.attend(scaled)


def _plain(x: Inputs) -> Attend:
    return lambda: scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def _bias_matrix(x: Inputs) -> Attend:
    def attend() -> Tensor:
        position = torch.arange(x.q.shape[2])
        distance = position[:, None] - position
        bias = x.prior(position)[:, distance.clamp(min=0)].masked_fill_(distance < 0, -torch.inf)
        return scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias[None])

    return attend


def _dense(x: Inputs) -> Attend:
    """Autograd through the whole matrix of logits. The bias is gathered from a table: on a CPU that is faster than
    evaluating the prior at each of the tokens² distances."""

    def attend() -> Tensor:
        position = torch.arange(x.q.shape[2])
        distance = position[:, None] - position
        bias = x.prior(position)[:, distance.clamp(min=0)]
        logits = (SIZE**-0.5 * x.q @ x.k.transpose(-1, -2) + bias) * x.scale(position + 1)[..., None]
        return logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ x.v

    return attend


def _flex(x: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = x.q.shape[2]
    table = x.prior(torch.arange(tokens)).detach().contiguous()

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def add_prior(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(min=0)]

    mask = create_block_mask(causal, None, None, tokens, tokens, device="cpu")
    # After some lengths dynamo compiles no more, and the eager fallback writes all logits out.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(x.q, x.k, x.v, score_mod=add_prior, block_mask=mask)


METHODS = [
    Method("plain SDPA, no prior", FORWARD, _plain, has_prior=False),
    Method("bayesattn", FORWARD, _ours(scaled=False)),
    Method("bayesattn, scaled", FORWARD, _ours(scaled=True), has_scale=True),
    Method("SDPA with bias matrix", FORWARD, _bias_matrix, matrices=4),
    Method("FlexAttention, compiled", FORWARD, _flex),
    Method("dense autograd, scaled", TRAINING, _dense, has_scale=True, matrices=9),
    Method("bayesattn, scaled", TRAINING, _ours(scaled=True), has_scale=True),
    Method("plain SDPA, no prior", TRAINING, _plain, has_prior=False),
    Method("FlexAttention, compiled", TRAINING, _flex),
]


def measure(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    memory: bool = True,
    flex: bool = True,
    methods: Sequence[Method] = METHODS,
) -> Iterator[list[Timing]]:
    """Measure every method at every length; yields the rows of one phase and length at a time."""
    for tokens in lengths:
        for phase in (FORWARD, TRAINING):
            selection = [m for m in methods if m.phase == phase and (flex or m.prepare is not _flex)]
            if selection:
                yield _measure(selection, tokens, seed, memory)


def most_tokens() -> int:
    """The longest sequence that every method of linear memory can train on in this machine's memory."""
    return int(device_memory() * SHARE_OF_MEMORY / BYTES_PER_TOKEN)


def sizes(seed: int) -> dict[str, object]:
    """Sizes, seed, software and hardware of the measurement."""
    return {
        "heads": HEADS,
        "head_size": SIZE,
        "batch": 1,
        "seed": seed,
        **environment(),
    }


def _measure(methods: Sequence[Method], tokens: int, seed: int, memory: bool) -> list[Timing]:
    inputs = Inputs.make(Shape(1, HEADS, HEADS, tokens, SIZE), seed)
    work: dict[str, Callable[[], object]] = {}
    errors: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for method in methods:
        room = device_memory() * SHARE_OF_MEMORY
        needed = bytes_needed(
            method.matrices * HEADS * tokens**2 * 4, room, tokens, partial(peak_memory, method) if memory else None
        )
        if needed > room:
            notes[method.name] = f"needs {needed / 1e9:.0f} GB"
            continue
        try:
            attend = method.prepare(inputs)
            errors[method.name] = None
            if method.has_prior:
                gradients = method.phase == TRAINING
                errors[method.name] = error(attend, inputs, scaled=method.has_scale, gradients=gradients)
        except Exception as problem:
            if method.prepare is not _flex:
                raise
            without = "does not support backward on CPU" in str(problem)
            notes[method.name] = "no backward on CPU" if without else f"does not compile here: {first_line(problem)}"
            continue
        work[method.name] = _work(method, attend, inputs)
    correct = {name: f for name, f in work.items() if (errors[name] or 0.0) <= LARGEST_ERROR}
    notes |= {name: f"wrong by {errors[name]:.1e}, not timed" for name in work if name not in correct}
    seconds = seconds_in_turn(correct)
    base = seconds.get(BASELINE[methods[0].phase])
    return [
        Timing(
            m.phase,
            m.name,
            tokens,
            seconds.get(m.name),
            seconds[m.name] / base if base and m.name in seconds else None,
            peak_memory(m, tokens, seed) if memory and m.name in seconds else None,
            errors.get(m.name),
            notes.get(m.name, ""),
        )
        for m in methods
    ]


def _work(method: Method, attend: Attend, inputs: Inputs) -> Callable[[], object]:
    """One function that runs the phase of the method."""
    return torch.no_grad()(attend) if method.phase == FORWARD else training(attend, inputs)


def peak_memory(method: Method, tokens: int, seed: int = 0) -> int:
    """Bytes that one of `METHODS` needs above its inputs, measured in a process of its own."""
    index = METHODS.index(method)
    return peak_bytes_of("bayesattn.studies.bench.attention.measure", str(index), str(tokens), str(seed))


def _print_peak(index: int, tokens: int, seed: int) -> None:
    method = METHODS[index]

    def work(tokens: int) -> Callable[[], object]:
        inputs = Inputs.make(Shape(1, HEADS, HEADS, tokens, SIZE), seed)
        return _work(method, method.prepare(inputs), inputs)

    work(CHECKED_QUERIES)()  # load everything that a first call loads
    run = work(tokens)
    if method.prepare is _flex:
        run()  # compiled for this length
    print(json.dumps(peak_bytes(run)))


if __name__ == "__main__":
    _print_peak(*(int(argument) for argument in sys.argv[1:]))
