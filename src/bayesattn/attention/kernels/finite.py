"""Inputs that are not finite make NaN of what sees them and of nothing else; logits too large to compute are refused.

Kernels mask by adding a large negative number. That is exact while every logit is small compared with it, and while no
hidden key or value is NaN: NaN + MASKED is NaN, and so is the product of a posterior of 0 and a value of NaN. The
norms of the inputs show whether either can happen. If so, keys and values that are not finite are replaced by zeros,
and the queries that see one get NaN.

Values are looked at on the CPU only: elsewhere the host would have to wait for them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bayesattn.attention.inputs import all_finite, can_check
from bayesattn.attention.kernels import blockwise
from bayesattn.attention.problem import LARGEST_LOGIT, LARGEST_PRIOR, Problem
from bayesattn.errors import NotFiniteError


def isolate(problem: Problem) -> tuple[Problem, Tensor | None]:
    """The problem without entries that are not finite, and which queries have or see one, `[B, H, M]`, or None.

    Raises:
        NotFiniteError: a query may have a logit beyond what kernels compute exactly.
    """
    p = problem
    if not can_check(p.q) or 0 in p.q.shape or p.num_keys == 0:
        return p, None
    scale = _largest_scale(p)
    content = _norm(p.q) * _norm(p.k) * abs(p.softmax_scale) * max(scale, 1.0)
    # The bound that every log-prior keeps is cheap, and enough unless a scale multiplies it.
    prior = LARGEST_PRIOR * scale if p.scale_prior else LARGEST_PRIOR
    if content + prior > LARGEST_LOGIT:
        prior = _largest_prior(p, scale)
    if content + prior <= LARGEST_LOGIT and all_finite(p.v):
        return p, None
    return _without_broken(p, scale)


def sees_every_key(problem: Problem) -> bool:
    """Whether there is one query, finite, that sees every key up to its position: no key can leak into its output."""
    p = problem
    if p.num_queries != 1 or p.documents is not None or not can_check(p.q):
        return False
    visible = p.log_prior[:, p.num_keys - p.visible_keys(1) :]
    return not visible.isneginf().any() and all_finite(p.q)


def _without_broken(problem: Problem, scale: float) -> tuple[Problem, Tensor | None]:
    p, masked = problem, problem.fully_masked()
    broken_keys = ~(p.k.isfinite().all(-1) & p.v.isfinite().all(-1))  # [B, G, N]
    broken_queries = ~p.q.isfinite().all(-1)  # [B, H, M]
    if masked is not None:
        broken_queries &= ~masked
    p = replace(
        p,
        q=p.q.masked_fill(~p.q.isfinite(), 0.0),
        k=p.k.masked_fill(broken_keys[..., None], 0.0),
        v=p.v.masked_fill(broken_keys[..., None], 0.0),
    )

    q = p.q.double() if masked is None else p.q.double().masked_fill(masked[..., None], 0.0)
    query_norm = q.norm(dim=-1).amax().item()
    key_norm = p.k.double().norm(dim=-1)
    prior, scale = _largest_prior(p, scale), abs(p.softmax_scale) * max(scale, 1.0)
    room = LARGEST_LOGIT - prior
    too_large = key_norm * query_norm * scale > room
    if room <= 0 or _sees(p, too_large).any():
        largest_key = key_norm.amax().item()
        raise NotFiniteError(
            f"logits may reach {query_norm * largest_key * scale + prior:.1e} (norms of queries reach "
            f"{query_norm:.1e}, of keys {largest_key:.1e}, log-priors {prior:.1e}); at most {LARGEST_LOGIT:.0e} is "
            "allowed, make them smaller"
        )
    p = replace(p, k=p.k.masked_fill(too_large[..., None], 0.0))
    broken = broken_queries | _sees(p, broken_keys) if broken_keys.any() else broken_queries
    return p, broken if broken.any() else None


def _sees(problem: Problem, chosen_BGN: Tensor) -> Tensor:
    """Which queries see one of the chosen keys, `[B, H, M]`: attention without content to a 1 at each of them."""
    p = problem
    hidden = p.log_prior.isneginf()
    plain = replace(
        p.without_rows,
        q=torch.zeros_like(p.q[..., :1], dtype=torch.float32),
        k=torch.zeros_like(p.k[..., :1], dtype=torch.float32),
        v=chosen_BGN.unsqueeze(-1).float(),
        log_prior=torch.zeros_like(p.log_prior).masked_fill(hidden, -torch.inf),
        query_scale=None,
        tolerance=0.0,
        needs_lse=False,
        needs_posterior=False,
    )
    return blockwise.forward(plain).out.squeeze(-1) > 0


def _norm(x: Tensor) -> float:
    """Of all entries, which bounds every product of two vectors; NaN or infinite if an entry is, or if it overflows."""
    return x.detach().norm(dtype=torch.promote_types(x.dtype, torch.float32)).item()


def _largest(x: Tensor) -> float:
    """The largest magnitude; NaN or infinite if an entry is."""
    low, high = (-bound(x.detach()).item() for bound in (torch.amin, torch.amax))  # faster than both at once
    return max(low, -high) if low == low else math.nan


def _largest_scale(problem: Problem) -> float:
    return 1.0 if problem.query_scale is None else _largest(problem.query_scale)


def _largest_prior(problem: Problem, scale: float) -> float:
    """The largest magnitude of a visible key's log-prior in a logit."""
    if problem.log_prior.numel() == 0:
        return 0.0
    prior = problem.log_prior.detach()
    largest = _largest(prior.masked_fill(prior.isneginf(), 0.0))
    return largest * scale if problem.scale_prior else largest
