"""Attention with a prior against its peers: `bayesattn bench attention`.

`python -m bayesattn.studies.bench.attention.measure METHOD TOKENS SEED` prints the peak memory of one method;
METHOD is its index in `METHODS`.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bayesattn as ba
from bayesattn.compute.device import device_memory
from bayesattn.errors import first_line
from bayesattn.studies.bench.attention.run import BASELINE, FORWARD, TRAINING, Phase, Timing
from bayesattn.studies.bench.measure import TIMING, peak_bytes, peak_bytes_of, seconds_in_turn

HEADS, SIZE = 8, 64
# The last queries, which see all keys, are compared with the float64 reference.
CHECKED_QUERIES = 64
# Relative error of float32 against float64. A wrong mask, distance or scale gives more than a hundred times this.
LARGEST_ERROR = 1e-4
# Memory per token of training with the leanest method, inputs included, rounded up.
BYTES_PER_TOKEN = 40_000
SHARE_OF_MEMORY = 0.6


@dataclass(frozen=True)
class Inputs:
    """One sequence and a learned prior with heavy-tailed, flat and retrieval heads.

    In none of these heads does the weight of a key vanish. So nothing is pruned, and all methods do the same work.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    prior: ba.GeneralizedGaussian
    scale: ba.ScalableSoftmax

    @staticmethod
    def make(tokens: int, seed: int = 0) -> Inputs:
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE)
        betas = torch.linspace(0.5, -1.0, HEADS).tolist()
        prior = ba.GeneralizedGaussian.from_shape(betas, [8.0] * HEADS, epsilon=1.0)
        return Inputs(q, k, v, prior, ba.ScalableSoftmax(HEADS, init=0.3))

    def trainable(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.prior.parameters(), *self.scale.parameters()]


@dataclass(frozen=True)
class Method:
    """One implementation of attention.

    `matrices` is the number of tokens × tokens matrices that it holds per head, 0 for linear memory.
    """

    name: str
    phase: Phase
    prepare: Callable[[Inputs], Callable[[], Tensor]]
    has_prior: bool = True
    has_scale: bool = False
    matrices: int = 0


def _ours(scaled: bool) -> Callable[[Inputs], Callable[[], Tensor]]:
    def prepare(x: Inputs) -> Callable[[], Tensor]:
        return lambda: ba.bayesian_attention(x.q, x.k, x.v, x.prior, query_scale=x.scale if scaled else None)

    return prepare


def _plain(x: Inputs) -> Callable[[], Tensor]:
    return lambda: scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def _bias_matrix(x: Inputs) -> Callable[[], Tensor]:
    def attend() -> Tensor:
        position = torch.arange(x.q.shape[2])
        distance = position[:, None] - position
        bias = x.prior(position)[:, distance.clamp(min=0)].masked_fill_(distance < 0, -torch.inf)
        return scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias[None])

    return attend


def _dense(x: Inputs) -> Callable[[], Tensor]:
    """Autograd through the whole matrix of logits. The bias is gathered from a table: on a CPU that is faster than
    evaluating the prior at each of the tokens² distances."""

    def attend() -> Tensor:
        position = torch.arange(x.q.shape[2])
        distance = position[:, None] - position
        bias = x.prior(position)[:, distance.clamp(min=0)]
        logits = (SIZE**-0.5 * x.q @ x.k.transpose(-1, -2) + bias) * x.scale(position + 1)[..., None]
        return logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ x.v

    return attend


def _flex(x: Inputs) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = x.q.shape[2]
    table = x.prior(torch.arange(tokens)).detach().contiguous()

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def add_prior(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(min=0)]

    mask = create_block_mask(causal, None, None, tokens, tokens, device="cpu")
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
        "dtype": "float32",
        "seed": seed,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "timing": TIMING,
    }


def _measure(methods: Sequence[Method], tokens: int, seed: int, memory: bool) -> list[Timing]:
    inputs = Inputs.make(tokens, seed)
    work: dict[str, Callable[[], object]] = {}
    errors: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for method in methods:
        needed = method.matrices * HEADS * tokens**2 * 4
        if needed > device_memory() * SHARE_OF_MEMORY:
            notes[method.name] = f"needs {needed / 1e9:.0f} GB"
            continue
        try:
            attend = method.prepare(inputs)
            errors[method.name] = _error(method, attend, inputs)
        except Exception as problem:
            if method.prepare is not _flex:
                raise
            notes[method.name] = f"does not compile here: {first_line(problem)}"
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


def _work(method: Method, attend: Callable[[], Tensor], inputs: Inputs) -> Callable[[], object]:
    """One function that runs the phase of the method."""
    if method.phase == FORWARD:
        return torch.no_grad()(attend)
    gradient = torch.randn_like(inputs.q)
    trainable = inputs.trainable()

    def work() -> object:
        for tensor in trainable:
            tensor.requires_grad_()
        return torch.autograd.grad(attend(), trainable, gradient, allow_unused=True)

    return work


def _error(method: Method, attend: Callable[[], Tensor], inputs: Inputs) -> float | None:
    """Largest relative error of the checked queries, or of their gradients, against the float64 reference."""
    if not method.has_prior:
        return None
    with torch.set_grad_enabled(method.phase == TRAINING):
        expected = _solution(_reference(inputs, method.has_scale), inputs, method.phase)
        actual = _solution(attend, inputs, method.phase)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


def _reference(inputs: Inputs, scaled: bool) -> Callable[[], Tensor]:
    prior, scale = inputs.prior, inputs.scale
    tokens = inputs.q.shape[2]
    counts = torch.arange(tokens - CHECKED_QUERIES + 1, tokens + 1).clamp(min=1)

    def attend() -> Tensor:
        return ba.bayesian_attention(
            inputs.q[:, :, -CHECKED_QUERIES:].double(),
            inputs.k.double(),
            inputs.v.double(),
            prior(torch.arange(tokens, dtype=torch.float64)),
            query_scale=scale(counts).double() if scaled else None,
            implementation="reference",
        )

    return attend


def _solution(attend: Callable[[], Tensor], inputs: Inputs, phase: str) -> list[Tensor]:
    if phase == FORWARD:
        return [attend()[:, :, -CHECKED_QUERIES:].double()]
    trainable = inputs.trainable()
    for tensor in trainable:
        tensor.requires_grad_()
    out = attend()[:, :, -CHECKED_QUERIES:].double()
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [out.detach(), *(g.double() for g in torch.autograd.grad(out, trainable, gradient))]


def peak_memory(method: Method, tokens: int, seed: int = 0) -> int:
    """Bytes that one of `METHODS` needs above its inputs, measured in a process of its own."""
    index = METHODS.index(method)
    return peak_bytes_of("bayesattn.studies.bench.attention.measure", str(index), str(tokens), str(seed))


def _print_peak(index: int, tokens: int, seed: int) -> None:
    method = METHODS[index]

    def work(tokens: int) -> Callable[[], object]:
        inputs = Inputs.make(tokens, seed)
        return _work(method, method.prepare(inputs), inputs)

    work(CHECKED_QUERIES)()  # load everything that a first call loads
    print(json.dumps(peak_bytes(work(tokens))))


if __name__ == "__main__":
    _print_peak(*(int(argument) for argument in sys.argv[1:]))
