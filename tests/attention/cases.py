"""Random attention problems, and the plain ways to solve them that kernels are measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import reference
from bayesattn.attention.kernels.blockwise import Gradients

KERNELS = ["blockwise", "sdpa"]


@dataclass
class Case:
    """Inputs of one call with a table as prior, so that its gradient can be compared as well."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    query_scale: Tensor | None
    settings: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        given = [self.q, self.k, self.v, self.table]
        return given if self.query_scale is None else [*given, self.query_scale]

    def to(self, dtype: torch.dtype) -> Case:
        """q, k, v in `dtype`; table and query scale, which are never rounded to half, in float32 or better."""
        wide = torch.promote_types(dtype, torch.float32)
        scale = None if self.query_scale is None else self.query_scale.to(wide)
        return replace(
            self,
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            table=self.table.to(wide),
            query_scale=scale,
        )

    def attend(self, implementation: str) -> Tensor:
        return ba.bayesian_attention(
            self.q,
            self.k,
            self.v,
            self.table,
            query_scale=self.query_scale,
            implementation=implementation,
            **self.settings,
        )

    def problem(self) -> ba.Problem:
        return make_problem(self.q, self.k, self.v, self.table, query_scale=self.query_scale, **self.settings)

    def attend_plainly(self) -> Tensor:
        """The formula in the precision of q throughout, as one would write it without thinking of rounding."""
        dtype, settings = self.q.dtype, self.settings
        queries, keys = self.q.shape[2], self.k.shape[2]
        group = self.q.shape[1] // self.k.shape[1]
        k, v = self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1)
        offset = settings.get("query_offset")
        offset = keys - queries if offset is None else offset
        i, j = torch.arange(queries)[:, None], torch.arange(keys)
        distance = offset + i - j
        causal = settings.get("causal", True)
        index = distance.clamp(min=0) if causal else distance + self.table.shape[1] // 2
        bias = self.table.to(dtype)[:, index].expand(len(self.q), -1, -1, -1)
        visible = ((distance >= 0) | (not causal)) & ~bias.isneginf()
        if (ids := settings.get("document_ids")) is not None:
            of_query = ids[:, offset : offset + queries]
            visible = visible & ((of_query[:, :, None] == ids[:, None]) & (of_query >= 0)[:, :, None])[:, None]
        scale = 1 if self.query_scale is None else self.query_scale.to(dtype)[..., None]
        softmax_scale = settings.get("softmax_scale") or self.q.shape[-1] ** -0.5
        content = softmax_scale * (self.q @ k.transpose(-1, -2))
        bias = bias.masked_fill(~visible, 0)
        logits = scale * (content + bias) if settings.get("scale_prior", True) else scale * content + bias
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        return weights.masked_fill(~visible.any(-1, keepdim=True), 0) @ v


def random_case(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    size: int = 8,
    scaled: str | None = "heads",
    documents: bool = False,
    hidden: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> Case:
    """A float64 case. `scaled`: a query scale per head, per batch and head, or none; `hidden`: share of −inf priors."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    offset = settings.get("query_offset")
    offset = keys - queries if offset is None else offset
    farthest = max(abs(offset + queries - 1), abs(offset - keys + 1)) + 3
    distance = torch.arange(farthest + 1) if settings.get("causal", True) else torch.arange(-farthest, farthest + 1)
    table = 2 * normal(heads, len(distance)) - 0.05 * distance.abs()
    table[torch.rand(table.shape, generator=generator) < hidden] = -torch.inf
    query_scale = {"heads": (heads, queries), "batch": (batch, heads, queries), None: None}[scaled]
    if documents:
        ids = torch.randint(0, 4, (batch, keys), generator=generator).eq(0).cumsum(1)
        ids[0, : keys // 4] = -1  # left padding
        settings["document_ids"] = ids
    return Case(
        normal(batch, heads, queries, size),
        normal(batch, kv_heads, keys, size),
        normal(batch, kv_heads, keys, size),
        table,
        None if query_scale is None else normal(*query_scale),
        settings,
    )


def gradients(case: Case, implementation: str, grad_out: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    tensors = [t.detach().clone().requires_grad_() for t in case.tensors()]
    scale = tensors[4] if len(tensors) == 5 else None
    fresh = replace(case, q=tensors[0], k=tensors[1], v=tensors[2], table=tensors[3], query_scale=scale)
    out = fresh.attend(implementation) if implementation != "plain" else fresh.attend_plainly()
    return [out.detach(), *torch.autograd.grad(out, tensors, grad_out.to(out.dtype))]


def reference_gradients(problem: ba.Problem, grad_out: Tensor) -> Gradients:
    """What autograd makes of the reference: the gradients that a kernel's backward pass is to give."""
    names = [name for name in Gradients._fields if name != "shared"]
    inputs = {name: getattr(problem, name) for name in names if getattr(problem, name) is not None}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    shared = tuple(x.detach().clone().requires_grad_() for x in problem.shared)
    out = reference.forward(replace(problem, shared=shared, **leaves)).out
    gradients = torch.autograd.grad(out, [*leaves.values(), *shared], grad_out)
    by_name = dict(zip(leaves, gradients, strict=False))
    return Gradients(*(by_name.get(name) for name in names), shared=gradients[len(leaves) :])  # type: ignore[arg-type]
