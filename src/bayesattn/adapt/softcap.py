"""Attention whose content is capped: softcap · tanh(softmax_scale · q·k / softcap), as in Gemma 2.

No kernel has it, so it is written in plain PyTorch, for some rows of queries at a time. With gradients, each block of
rows is computed again in the backward pass. Memory is linear in the number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bayesattn.attention.kernels.reference import conditioned_rows
from bayesattn.attention.kernels.registry import without_autocast
from bayesattn.attention.problem import MASKED, Problem

ROWS = 128
WITH_SOFTCAP = "{layer} has softcap, with which Sinks do not work; leave that layer out"


def attend_softcapped(problem: Problem, softcap: float) -> Tensor:
    """The output `[B, H, M, E]` of a problem whose content logits are capped at ±softcap before the prior is added."""
    p = problem
    blocks = []
    with without_autocast(p.q):
        for first in range(0, p.num_queries, ROWS):
            rows = (p, softcap, first, min(first + ROWS, p.num_queries))
            if torch.is_grad_enabled():
                blocks.append(checkpoint(_rows, *rows, use_reentrant=False))
            else:
                blocks.append(_rows(*rows))
    return torch.cat(blocks, 2) if blocks else p.q.new_empty(*p.q.shape[:3], p.v.shape[-1])


def _rows(p: Problem, softcap: float, first: int, last: int) -> Tensor:
    """Output of the queries from `first` to before `last`."""
    stop = p.visible_keys(last)
    k, v = (x[:, :, :stop].to(p.dtype).repeat_interleave(p.group, 1) for x in (p.k, p.v))
    q = p.q[:, :, first:last].to(p.dtype)
    row = torch.arange(first, last, device=q.device).unsqueeze(1)
    key = torch.arange(stop, device=q.device)
    prior = p.log_prior.to(p.dtype)[:, row - key + p.num_keys - 1]
    visible = ~prior.isneginf()
    if p.documents is not None:
        start, end = p.documents[:, first:last, None].unbind(-1)
        visible = visible & ((key >= start) & (key < end)).unsqueeze(1)
    prior = prior.masked_fill(prior.isneginf(), 0.0)
    if p.parameters is not None:
        parameters = p.parameters[:, :, first:last]
        some = replace(p, q=q, k=p.k[:, :, :stop], parameters=parameters, offset=p.offset + first)
        prior = prior + conditioned_rows(some)
    logits = softcap * torch.tanh(p.softmax_scale / softcap * (q @ k.transpose(-1, -2)))
    if p.query_scale is not None:
        scale = p.query_scale[:, :, first:last].to(p.dtype).unsqueeze(-1)
        logits = scale * (logits + prior) if p.scale_prior else scale * logits + prior
    else:
        logits = logits + prior
    weights = logits.masked_fill(~visible, MASKED).softmax(-1).masked_fill(~visible, 0.0)
    return (weights @ v).to(p.q.dtype)
