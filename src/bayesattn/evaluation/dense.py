"""Reading the dense way, every logit and every bias written out: what pruning and the cache are measured against."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention import visible_counts
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import Task
from bayesattn.models.layers import BamAttention, BamLayer
from bayesattn.models.modeling import BamForCausalLM

# Elements of the logits that are written out at a time.
ELEMENTS = 2**22


@dataclass(frozen=True)
class Comparison:
    """Seconds to the first token of an answer, read as always and the dense way, and how far their logits differ."""

    length: int
    seconds: float
    dense_seconds: float
    error: float

    @property
    def ratio(self) -> float:
        return self.dense_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def check(reader: Reader) -> None:
    """One sentence for a model that cannot be compared."""
    if not isinstance(reader.model, BamForCausalLM):
        raise UserError(f"{reader.name} has no other way to read than its own; the comparison is for BAM models")


@torch.inference_mode()
def compare(reader: Reader, task: Task, length: int, seed: int = 0) -> Comparison:
    """One prompt, read both ways; the faster one first, once to warm up."""
    check(reader)
    model = reader.model
    prompt = task.prompts(reader)(Random(f"{seed} {task.seeded} {length} 0"), length, None)
    ids = torch.tensor([prompt.ids], device=model.device)

    def read() -> Tensor:
        return model(input_ids=ids, past_key_values=model.make_cache(), logits_to_keep=1).logits[0, -1]

    read()
    begin = time.perf_counter()
    logits = read()
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    dense = dense_logits(model, ids)
    return Comparison(length, seconds, time.perf_counter() - begin, (logits - dense).abs().max().item())


def dense_logits(model: BamForCausalLM, ids: Tensor) -> Tensor:
    """Of the last position; all rows of all layers, some rows of logits at a time. Hindsight is as the model has it."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    model.model._stretch(positions, fresh=True)
    x, rotary = model.model._embed(ids, positions)
    first, memory, later = len(model.model.layers) - model.config.reading_layers, x, None
    for number, layer in enumerate(model.model.layers):
        assert isinstance(layer, BamLayer)
        memory = x if number <= first else memory
        if number == first and model.model.hindsight is not None:
            later = model.model.hindsight.look_back(x)
        seen = layer.input_layernorm(memory), None if later is None else layer.input_layernorm(later)
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), *seen, rotary)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x[:, -1]))[0]


def _attend(
    attention: BamAttention, asked: Tensor, x: Tensor, later: Tensor | None, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    n = x.shape[1]
    q, k, v = attention.project(asked, x, later, rotary)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    q = q / q.shape[-1] ** 0.5
    r = None if attention.temperature is None else attention.temperature(visible_counts(n, n, device=x.device))
    # Entry n − 1 − i + j is that of query i and key j: distances falling to 0, then the future, which is masked below.
    table = attention.prior(torch.arange(n, device=x.device)).to(q.dtype)
    table = pad(table.flip(-1), (0, n))
    rows = max(1, ELEMENTS // (q.shape[1] * n))
    parts = []
    for first in range(0, n, rows):
        last = min(n, first + rows)
        content = q[:, :, first:last] @ k[:, :, :last].mT
        bias = torch.stack([table[:, n - 1 - row : n - 1 - row + last] for row in range(first, last)], 1)
        scale = 1.0 if r is None else r[..., first:last, None]
        logits = (content + bias) * scale if attention.config.scale_prior else content * scale + bias
        future = torch.ones(last - first, last - first, dtype=torch.bool, device=x.device).triu(1)
        logits[..., first:].masked_fill_(future, -torch.inf)
        parts.append(logits.softmax(-1) @ v[:, :, :last])
    return attention.o_proj(torch.cat(parts, 2).transpose(1, 2).flatten(2))
