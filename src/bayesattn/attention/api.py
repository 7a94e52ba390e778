"""The public functions: the docstring of `bayesian_attention` is the specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bayesattn.attention.inputs import check_names, make_problem
from bayesattn.attention.kernels import reference
from bayesattn.attention.kernels.finite import isolate
from bayesattn.attention.kernels.registry import without_autocast
from bayesattn.attention.plan import Plan, keep_everything, plan
from bayesattn.attention.sinks import AnySinks, plan_with_sinks, posterior_with_sinks, solve_with_sinks, split_sinks
from bayesattn.priors.base import Prior
from bayesattn.priors.conditioned import GivenPrior

# What attention takes as log-prior, besides None.
AnyPrior: TypeAlias = Prior | GivenPrior | AnySinks | Tensor


def bayesian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: AnyPrior | None = None,
    *,
    query_scale: Tensor | Callable[[Tensor], Tensor] | None = None,
    scale_prior: bool = True,
    causal: bool = True,
    softmax_scale: float | None = None,
    query_offset: int | None = None,
    document_ids: Tensor | None = None,
    tolerance: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Attention whose weights are a posterior: content likelihood times a prior over distance.

    For query i at position `query_offset` + i and key j at position j, with d the difference of the two positions,

        logit_ij = r_i · (softmax_scale · q_i·k_j + log_prior(d))        output_i = Σ_j softmax_j(logit_ij) · v_j

    over the keys that query i sees: in causal attention those with d ≥ 0; with documents those of its own; and never
    one whose log-prior is −inf (or below −1e28), whatever r_i. A query that sees no key gets zeros and passes no
    gradient. A query that is not finite, or sees a key or value that is not, gets NaN, and no other query does; an
    infinite key that gives the only query a logit of −inf may have no weight instead. Logits, softmax and sums are in
    float32 (for float64 inputs in float64), and memory is linear in the number of tokens except for `reference`.

    Differentiable in q, k, v, the prior and the query scale, by autograd and `torch.func`. Forward mode and second
    derivatives raise an error that names `reference`, which has them.

    Args:
        q: `[B, H, Nq, D]`, float64, float32, bfloat16 or float16, of any strides.
        k: `[B, Hkv, Nk, D]`; Hkv divides H, and H / Hkv neighbouring query heads share each key head.
        v: `[B, Hkv, Nk, Dv]`.
        log_prior: a `Prior` of H heads; or a conditioned one with its states, `prior.given(states)`, with which
            log_prior is another function of d for every query; or a table, `[H, n]` for causal distances 0 … n−1,
            `[H, 2n−1]` for distances −(n−1) … n−1 when not causal, at least as long as the distances that occur; or
            None for a uniform prior. `Sinks(prior)` replaces log_prior(d) by a number for each of the first keys of a
            document, whatever d is (those in the future stay hidden).
        query_scale: r, `[H, Nq]` or `[B, H, Nq]`; or a module such as `ScalableSoftmax`, called with the number of keys
            each query sees (`visible_counts`); None for 1. Any sign, and 0, is allowed.
        scale_prior: False for r_i · softmax_scale · q_i·k_j + log_prior(d): the query scale leaves the prior alone.
        causal: whether keys after the query are hidden.
        softmax_scale: 1/√D by default.
        query_offset: position of the first query. By default Nk − Nq: the queries are the last of the keys' positions.
        document_ids: `[B, Nk]` integers, the same within a document, each document one unbroken stretch; negative ids
            are padding, which sees nothing and is not seen. Queries must stand at positions of keys.
        tolerance: in [0, 1). All but `reference` leave out keys whose total posterior mass is provably at most this
            for every query, so that the output is off by at most 2 · tolerance · max‖v‖. With 0, only keys whose weight
            is zero in the working precision.
        implementation: `reference` (dense), `blockwise` (any device), `sdpa` (CPU), `flex` (CUDA), a registered kernel,
            or `auto`: the fastest that can. A kernel given by name is used, or the call fails.

    Returns:
        `[B, H, Nq, Dv]` in the dtype of q.

    Raises:
        TypeError, ValueError: one sentence with what was given and what is allowed. Values (NaN, logits beyond 1e29,
            documents in pieces) are checked on the CPU only: elsewhere the host would have to wait for them. Those of
            the prior, the query scale and the documents are not checked in `torch.compile` and `torch.vmap` either,
            and with `reference` none are.
        RuntimeError: a derivative that the kernel does not have.
    """
    prior, sinks = split_sinks(log_prior)
    problem = make_problem(
        q, k, v, prior, query_scale=query_scale, scale_prior=scale_prior, causal=causal,
        softmax_scale=softmax_scale, query_offset=query_offset, document_ids=document_ids, tolerance=tolerance,
    )  # fmt: skip
    return solve_with_sinks(problem, sinks, implementation).out


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, log_prior: AnyPrior | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """`bayesian_attention` with the same arguments, and the log-sum-exp of its logits.

    The log-sum-exp is lse_i = log Σ_j exp(logit_ij) over the keys that query i sees. With it, two attentions of the
    same queries over different keys combine to the attention over all of them:

        output = sigmoid(lse_1 − lse_2) · output_1 + sigmoid(lse_2 − lse_1) · output_2

    Returns:
        The output, `[B, H, Nq, Dv]`, and the log-sum-exp, `[B, H, Nq]` in float32, or in float64 for float64 inputs. A
        query that sees no key has −inf. Both are differentiable.
    """
    implementation = settings.pop("implementation", "auto")
    check_names("attention_with_lse", settings)
    prior, sinks = split_sinks(log_prior)
    problem = make_problem(q, k, v, prior, **settings)
    solution = solve_with_sinks(replace(problem, needs_lse=True), sinks, implementation)
    if solution.lse is None:
        raise ValueError(f"implementation {implementation!r} returns no log-sum-exp; use 'blockwise' or 'auto'")
    return solution.out, solution.lse


def posterior(
    q: Tensor,
    k: Tensor,
    log_prior: AnyPrior | None = None,
    *,
    query_scale: Tensor | Callable[[Tensor], Tensor] | None = None,
    scale_prior: bool = True,
    causal: bool = True,
    softmax_scale: float | None = None,
    query_offset: int | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """The weights with which `bayesian_attention` mixes the values: softmax_j(logit_ij), written out.

    The arguments are those of `bayesian_attention`. The weights are differentiable and take memory of Nq · Nk.

    Returns:
        `[B, H, Nq, Nk]` in float32, or in float64 for float64 inputs. A query that sees no key has zeros.
    """
    prior, sinks = split_sinks(log_prior)
    problem = make_problem(
        q, k, k, prior, query_scale=query_scale, scale_prior=scale_prior, causal=causal,
        softmax_scale=softmax_scale, query_offset=query_offset, document_ids=document_ids,
    )  # fmt: skip
    if sinks is not None:
        return posterior_with_sinks(problem, sinks)
    problem, broken = isolate(problem)
    with without_autocast(q):
        weights = reference.posterior(problem)
    return weights if broken is None else weights.masked_fill(broken.unsqueeze(-1), torch.nan)


def attention_plan(q: Tensor, k: Tensor, v: Tensor, log_prior: AnyPrior | None = None, **settings: Any) -> Plan:
    """Which keys `bayesian_attention` with the same arguments would leave out.

    Printed, the plan shows per head the share of the visible blocks of queries × keys that is computed, and its FLOPs.
    """
    settings.pop("implementation", None)
    check_names("attention_plan", settings)
    prior, sinks = split_sinks(log_prior)
    with torch.no_grad():
        problem = make_problem(q, k, v, prior, **settings)
        if sinks is not None:
            return plan_with_sinks(problem, sinks)
        return plan(problem) or keep_everything(problem)
