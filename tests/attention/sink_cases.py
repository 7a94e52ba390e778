"""Random attention problems with sinks, and the formula by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import bayesattn as ba
from tests.attention.cases import Case, random_case


class OfTable(ba.Prior):
    """The prior whose log-priors stand in a table, `[H, n]` of causal distances or `[H, 2n − 1]` of all."""

    def __init__(self, table: Tensor, causal: bool) -> None:
        super().__init__(len(table))
        self.table = table if isinstance(table, nn.Parameter) else nn.Parameter(table)
        self.zero = 0 if causal else table.shape[1] // 2

    def forward(self, distance: Tensor) -> Tensor:
        return self.table[:, self.zero + distance.long()]


@dataclass
class SinkCase:
    """A `Case` whose table is the prior of the keys that are no sinks."""

    case: Case
    log_prior: Tensor  # [H, C]

    def tensors(self) -> list[Tensor]:
        return [*self.case.tensors(), self.log_prior]

    def of(self, *tensors: Tensor) -> SinkCase:
        """The same with other tensors, in the order of `tensors()`."""
        q, k, v, table, *rest = tensors
        scale = rest[0] if len(rest) == 2 else None
        return SinkCase(replace(self.case, q=q, k=k, v=v, table=table, query_scale=scale), rest[-1])

    def sinks(self) -> ba.Sinks:
        causal = self.case.settings.get("causal", True)
        sinks = ba.Sinks(OfTable(self.case.table.detach(), causal), self.log_prior.shape[1])
        # What autograd should follow are these tensors themselves.
        for module, name, x in ((sinks, "log_prior", self.log_prior), (sinks.prior, "table", self.case.table)):
            del module._parameters[name]
            setattr(module, name, x)
        return sinks

    def settings(self) -> dict[str, Any]:
        return {"query_scale": self.case.query_scale, **self.case.settings}

    def attend(self, implementation: str) -> Tensor:
        c = self.case
        return ba.bayesian_attention(c.q, c.k, c.v, self.sinks(), implementation=implementation, **self.settings())

    def with_lse(self, implementation: str) -> tuple[Tensor, Tensor]:
        c = self.case
        return ba.attention_with_lse(c.q, c.k, c.v, self.sinks(), implementation=implementation, **self.settings())


def random_sinks(queries: int, keys: int | None = None, count: int = 3, **settings: Any) -> SinkCase:
    """`random_case` with sinks whose log-priors are random."""
    case = random_case(queries, keys, **settings)
    generator = torch.Generator().manual_seed(7)
    return SinkCase(case, torch.randn(case.q.shape[1], count, dtype=torch.float64, generator=generator))


def visible_keys(case: SinkCase, b: int, h: int, i: int) -> list[tuple[int, float]]:
    """(key, log-prior) of all keys that a query sees."""
    c, settings = case.case, case.case.settings
    queries, keys = c.q.shape[2], c.k.shape[2]
    causal, ids = settings.get("causal", True), settings.get("document_ids")
    offset = settings.get("query_offset")
    position = (keys - queries if offset is None else offset) + i
    zero, seen = 0 if causal else c.table.shape[1] // 2, []
    for j in range(keys):
        first = 0
        if ids is not None:
            if ids[b, position] != ids[b, j] or ids[b, j] < 0:
                continue
            first = ids[b].tolist().index(int(ids[b, j]))
        if causal and j > position:
            continue
        is_sink = j - first < case.log_prior.shape[1]
        log_prior = float(case.log_prior[h, j - first] if is_sink else c.table[h, zero + position - j])
        if log_prior > -math.inf:
            seen.append((j, log_prior))
    return seen


def by_hand(case: SinkCase) -> Tensor:
    """The formula, one query and one key at a time."""
    c, scale_prior = case.case, case.case.settings.get("scale_prior", True)
    out = torch.zeros_like(c.q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, c.q.shape[:3])).tolist():
        g = h * c.k.shape[1] // c.q.shape[1]
        scale = 1.0
        if c.query_scale is not None:
            scale = float(c.query_scale[h, i] if c.query_scale.dim() == 2 else c.query_scale[b, h, i])
        seen = visible_keys(case, b, h, i)
        logits = []
        for j, log_prior in seen:
            content = float(c.q[b, h, i] @ c.k[b, g, j]) / math.sqrt(c.q.shape[-1])
            logits.append(scale * (content + log_prior) if scale_prior else scale * content + log_prior)
        if seen:
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            out[b, h, i] = weights @ c.v[b, g, [j for j, _ in seen]]
    return out
