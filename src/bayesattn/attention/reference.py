"""The specification in code: dense, obvious, differentiable by autograd. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesattn.attention.problem import Problem


def forward(problem: Problem) -> Tensor:
    p, dtype = problem, problem.dtype
    k = p.k.repeat_interleave(p.group, dim=1)
    v = p.v.repeat_interleave(p.group, dim=1)
    content = p.softmax_scale * p.q.to(dtype) @ k.to(dtype).transpose(-1, -2)

    i = torch.arange(p.num_queries, device=p.q.device)[:, None]
    j = torch.arange(p.num_keys, device=p.q.device)[None, :]
    prior = p.log_prior.to(dtype)[:, i - j + p.num_keys - 1]
    visible = prior.isneginf().logical_not().expand_as(content)
    if p.documents is not None:
        start, stop = p.documents[:, None, :, None, :].unbind(-1)
        visible = visible & (start <= j) & (j < stop)

    prior = prior.masked_fill(~visible, 0.0)  # masked again below: a zero scale times −inf would be NaN
    scale = torch.ones((), dtype=dtype) if p.query_scale is None else p.query_scale.to(dtype)[..., None]
    logits = scale * (content + prior) if p.scale_prior else scale * content + prior
    posterior = torch.where(visible, logits, -torch.inf).softmax(-1)
    posterior = torch.where(visible.any(-1, keepdim=True), posterior, 0.0)
    return (posterior @ v.to(dtype)).to(p.q.dtype)
