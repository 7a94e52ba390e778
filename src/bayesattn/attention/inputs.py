"""Validation of `bayesian_attention`'s arguments: each error names what was given and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesattn.attention.problem import ID_DTYPES, LARGEST_PRIOR, Problem, document_ranges, visible_counts
from bayesattn.attention.transforms import in_vmap
from bayesattn.errors import NotFiniteError, check_flags, is_number, no_setting, shown
from bayesattn.priors.base import Prior
from bayesattn.priors.conditioned import ConditionedPrior, GivenPrior

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Positions beyond this are no longer exact in float64.
FARTHEST = 2**53
# Neither are distances beyond this in float32, where the log-prior of neighbouring keys would become one.
FARTHEST_FLOAT32 = 2**24


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_prior: Prior | GivenPrior | Tensor | None,
    *,
    query_scale: Tensor | Callable[[Tensor], Tensor] | None = None,
    scale_prior: bool = True,
    causal: bool = True,
    softmax_scale: float | None = None,
    query_offset: int | None = None,
    document_ids: Tensor | None = None,
    tolerance: float = 0.0,
) -> Problem:
    """Check the arguments of `bayesian_attention` and bring them into the form that kernels take."""
    check_inputs(q, k, v)
    check_tolerance(tolerance)
    check_flags(scale_prior=scale_prior, causal=causal)
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else check_softmax_scale(softmax_scale)
    offset = _offset(q, k, query_offset)
    documents = None if document_ids is None else _documents(document_ids, q, k, offset)
    given = log_prior if isinstance(log_prior, GivenPrior) else None
    problem = Problem(
        q, k, v,
        log_prior=_table(log_prior if given is None else given.static, q, k, causal, offset),
        query_scale=_query_scale(query_scale, q, k, causal, offset, document_ids),
        documents=documents, softmax_scale=softmax_scale, scale_prior=scale_prior, causal=causal, offset=offset,
        tolerance=float(tolerance),
    )  # fmt: skip
    if given is None:
        return problem
    check_given(given, q)
    return replace(problem, parameters=given.parameters, shared=given.shared, family=given.family.family)


def check_names(function: str, settings: Iterable[str]) -> None:
    """Raise an error for keyword arguments that `make_problem` does not have."""
    parameters = inspect.signature(make_problem).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in settings:
        if name not in known:
            raise TypeError(no_setting(function, name, [*known, "implementation"]))


def check_tolerance(tolerance: object) -> None:
    """Raise an error unless it is a share of posterior mass."""
    if not is_number(tolerance) or not 0.0 <= tolerance < 1.0:  # type: ignore[operator]
        raise ValueError(f"tolerance is {shown(tolerance)}; it must be a number in [0, 1)")


def check_softmax_scale(softmax_scale: object) -> float:
    """The number, or an error."""
    if isinstance(softmax_scale, torch.SymFloat):
        return softmax_scale  # type: ignore[return-value]
    if isinstance(softmax_scale, Tensor):
        raise TypeError("softmax_scale is a tensor; a number is needed, and query_scale is what can be learned")
    if not is_number(softmax_scale):
        raise ValueError(f"softmax_scale is {shown(softmax_scale)}; it must be a finite number")
    return float(softmax_scale)  # type: ignore[arg-type]


def _offset(q: Tensor, k: Tensor, query_offset: int | None) -> int:
    if query_offset is None:
        return k.shape[2] - q.shape[2]
    whole = isinstance(query_offset, (int, torch.SymInt)) and not isinstance(query_offset, bool)
    if not whole or not -FARTHEST <= query_offset <= FARTHEST:
        raise ValueError(
            f"query_offset is {shown(query_offset)}; the position of the first query, a whole number from -2**53 to "
            "2**53, is needed"
        )
    return query_offset


def check_dense(name: str, x: Tensor) -> None:
    """Raise an error for a sparse, nested or quantized tensor."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a tensor of the kind {kind}; a dense tensor is needed")


def check_tensor(name: str, x: object) -> None:
    """Raise an error unless it is a dense tensor of four dimensions and of a dtype that attention is computed in."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor [batch, heads, tokens, head size]")
    check_dense(name, x)
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, tokens, head size]")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}; float64, float32, bfloat16 and float16 are allowed")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error if the types, shapes, dtypes or devices of q, k and v do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}; they must agree")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; batch, heads and tokens must agree")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q has shape {list(q.shape)} and k {list(k.shape)}; batch and head size must agree")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(
            f"q has shape {list(q.shape)} and v {list(v.shape)}; head size and value size must be at least 1"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; the heads of k must divide those of q")


def check_given(given: GivenPrior, q: Tensor) -> None:
    """Raise an error unless the prior is one of these queries."""
    if not isinstance(given.family, type) or not issubclass(given.family, ConditionedPrior):
        raise TypeError(
            f"the family of the GivenPrior is {shown(given.family)}; a subclass of ConditionedPrior is needed"
        )
    name, parameters, (batch, heads, queries, _) = given.family.__name__, given.parameters, q.shape
    if given.num_heads != heads:
        raise ValueError(f"{name} has {given.num_heads} heads and q has {heads}; they must agree")
    for label, x in (("parameters", parameters), *(("shared tensors", x) for x in given.shared)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} gives {label} of the kind {kind}; floating-point tensors are needed")
        check_dense(f"{name}'s {label}", x)
        if x.device != q.device:
            raise ValueError(f"{name}'s {label} are on {x.device} and q on {q.device}; they must be on the same device")
    shape = list(parameters.shape)
    if len(shape) != 4 or shape[1] not in (1, heads):
        raise ValueError(
            f"{name} gives parameters of shape {shape}; [{batch} or 1, {heads} or 1, {queries}, number] is needed"
        )
    if shape[2] != queries:
        raise ValueError(f"{name} was given the states of {shape[2]} queries and q has {queries}; they must agree")
    if shape[0] not in (1, batch):
        raise ValueError(f"{name} was given the states of {shape[0]} sequences and q has {batch}; they must agree")
    for x in given.shared:
        if x.dim() == 0 or x.shape[0] not in (1, heads):
            raise ValueError(
                f"{name} has a shared tensor of shape {list(x.shape)}; its first dimension must be {heads}, one "
                "entry a head, or 1"
            )
    if can_check(q) and not all(map(all_finite, (parameters, *given.shared))):
        raise NotFiniteError(f"{name} has parameters that are NaN or infinite; finite numbers are needed")


def _table(log_prior: object, q: Tensor, k: Tensor, causal: bool, offset: int) -> Tensor:
    """The log-prior of the distances that occur, lowest first; in causal attention negative distances have −inf."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    entries = max(0, queries + keys - 1)
    lowest, highest = offset - keys + 1, offset + queries - 1
    hidden = 0
    if causal:  # not a minimum of the two: torch.export cannot reason about that for a length that varies
        hidden = max(0, -lowest) if highest >= 0 else entries
    first = lowest + hidden

    if log_prior is None:
        table = torch.zeros(heads, entries - hidden, device=q.device)
    elif isinstance(log_prior, Prior):
        distance = torch.arange(first, first + entries - hidden, device=q.device)
        table = _evaluate(log_prior, q, distance, max(abs(first), abs(highest)))
    elif isinstance(log_prior, Tensor):
        table = check_table("the table", _cut(log_prior, q, causal, first, highest, entries - hidden))
    elif isinstance(log_prior, ConditionedPrior):
        name = type(log_prior).__name__
        raise TypeError(f"{name} depends on the query; give prior.given(states) to attention, not the prior itself")
    else:
        raise TypeError(f"log_prior is a {type(log_prior).__name__}; a Prior, a table [heads, n] or None is allowed")
    return pad(table, (hidden, 0), value=-torch.inf)


def evaluate_prior(prior: Prior, distance: Tensor) -> Tensor:
    """The log-prior of distances `[n]`, `[H, n]`, or an error. What is too low to be seen is −inf."""
    table: Tensor = prior(distance)
    if table.shape != (prior.num_heads, distance.shape[0]):
        raise ValueError(
            f"{type(prior).__name__} returned shape {list(table.shape)} for {len(distance)} distances; "
            f"a prior returns [heads, *distance.shape], here {[prior.num_heads, len(distance)]}"
        )
    return check_table(type(prior).__name__, table)


def check_table(name: str, table: Tensor) -> Tensor:
    """The log-priors with −inf for what is too low to be seen, or an error for NaN and what is too large."""
    if can_check(table) and table.numel() and not table.amax() <= LARGEST_PRIOR:  # true for NaN as well
        heads_at_fault = (table <= LARGEST_PRIOR).logical_not().any(-1).nonzero().flatten().tolist()
        raise ValueError(
            f"{name} gives NaN or more than {LARGEST_PRIOR:.0e} for heads {shown(heads_at_fault)}; log-priors are "
            "numbers up to that, or -inf"
        )
    return table.masked_fill(table < -LARGEST_PRIOR, -torch.inf)


def _evaluate(prior: Prior, q: Tensor, distance: Tensor, farthest: int) -> Tensor:
    if q.dtype != torch.float64 and farthest > FARTHEST_FLOAT32:
        raise ValueError(
            f"distances reach {farthest:,}; float32 tells distances up to {FARTHEST_FLOAT32:,} apart, use float64"
        )
    if prior.num_heads != q.shape[1]:
        raise ValueError(f"{type(prior).__name__} has {prior.num_heads} heads and q has {q.shape[1]}; they must agree")
    table = evaluate_prior(prior, distance if q.dtype != torch.float64 else distance.double())
    if table.device != q.device:
        raise ValueError(
            f"{type(prior).__name__} is on {table.device} and q on {q.device}; move the prior to q's device"
        )
    return table


def _cut(table: Tensor, q: Tensor, causal: bool, first: int, highest: int, entries: int) -> Tensor:
    heads = q.shape[1]
    check_dense("the log_prior table", table)
    if table.dim() != 2 or table.shape[0] != heads or not table.is_floating_point():
        raise ValueError(
            f"the log_prior table is {table.dtype} of shape {list(table.shape)}; a floating-point tensor "
            f"[{heads}, n], one row per head, is needed"
        )
    if table.device != q.device:
        raise ValueError(
            f"the log_prior table is on {table.device} and q on {q.device}; they must be on the same device"
        )
    if entries == 0:
        return table[:, :0]
    if causal:
        if table.shape[1] <= highest:
            raise ValueError(
                f"the log_prior table has {table.shape[1]} entries; causal distances 0 … {highest} need {highest + 1}"
            )
        return table[:, first : highest + 1]
    farthest = max(abs(first), abs(highest))
    if table.shape[1] % 2 == 0 or table.shape[1] < 2 * farthest + 1:
        raise ValueError(
            f"the log_prior table has {table.shape[1]} entries; without causal=True distances −{farthest} … {farthest} "
            f"need {2 * farthest + 1} or a larger odd number, with distance 0 in the middle"
        )
    zero = table.shape[1] // 2
    return table[:, zero + first : zero + highest + 1]


def _query_scale(
    query_scale: Tensor | Callable[[Tensor], Tensor] | None,
    q: Tensor,
    k: Tensor,
    causal: bool,
    offset: int,
    document_ids: Tensor | None,
) -> Tensor | None:
    """r as [1 or B, H, Nq]."""
    if query_scale is None:
        return None
    if not isinstance(query_scale, Tensor):
        if not callable(query_scale):
            raise TypeError(f"query_scale is a {type(query_scale).__name__}; a tensor, a module or None is allowed")
        counts = visible_counts(
            q.shape[2], k.shape[2], causal=causal, query_offset=offset, document_ids=document_ids, device=q.device
        )
        query_scale = query_scale(counts.double() if q.dtype == torch.float64 else counts)
        if not isinstance(query_scale, Tensor):
            raise TypeError(f"the query_scale module returned a {type(query_scale).__name__}; a tensor is needed")
    return check_query_scale(query_scale, q)


def check_query_scale(query_scale: Tensor, q: Tensor) -> Tensor:
    """r as [1 or B, H, Nq], or an error."""
    check_dense("query_scale", query_scale)
    given, allowed = list(query_scale.shape), [list(q.shape[1:3]), list(q.shape[:3])]
    # `in` compares by identity first, which sizes that torch.compile traces do not survive.
    if not any(given == shape for shape in allowed) or not query_scale.is_floating_point():
        raise ValueError(
            f"query_scale is {query_scale.dtype} of shape {given}; floating-point tensors of shape {allowed[0]} or "
            f"{allowed[1]} are allowed"
        )
    if query_scale.device != q.device:
        raise ValueError(f"query_scale is on {query_scale.device} and q on {q.device}; they must be on the same device")
    if can_check(query_scale) and not all_finite(query_scale):
        raise ValueError("query_scale has NaN or infinite entries; only finite numbers are allowed")
    return query_scale if query_scale.dim() == 3 else query_scale.unsqueeze(0)


def _documents(document_ids: Tensor, q: Tensor, k: Tensor, offset: int) -> Tensor:
    """The key range of each query's document, [B, Nq, 2]."""
    if not isinstance(document_ids, Tensor) or document_ids.dtype not in ID_DTYPES:
        given = document_ids.dtype if isinstance(document_ids, Tensor) else type(document_ids).__name__
        raise TypeError(f"document_ids is {given}; a tensor of integers is needed, int64 for example")
    check_dense("document_ids", document_ids)
    batch, keys, queries = k.shape[0], k.shape[2], q.shape[2]
    if document_ids.shape != (batch, keys) or document_ids.device != q.device:
        raise ValueError(
            f"document_ids has shape {list(document_ids.shape)} on {document_ids.device}; one id per key, "
            f"[{batch}, {keys}] on {q.device}, is needed"
        )
    if offset < 0 or offset + queries > keys:
        raise ValueError(
            f"queries stand at positions {offset} … {offset + queries - 1} and keys at 0 … {keys - 1}; "
            "with document_ids every query must stand at the position of a key"
        )
    if can_check(document_ids) and _count_runs(document_ids) != _count_runs(document_ids.sort(1).values):
        raise ValueError("document_ids has a document in several pieces; each document must be one unbroken stretch")
    return document_ranges(document_ids)[:, offset : offset + queries]


def _count_runs(document_ids: Tensor) -> int:
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    return int((changes & (document_ids[:, 1:] >= 0)).sum() + (document_ids[:, :1] >= 0).sum())


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum shows it fastest; one that overflows does not tell."""
    x = x.detach()
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


def can_check(x: Tensor) -> bool:
    """Whether values can be looked at: on the CPU, and neither while compiling nor under `torch.vmap`."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not in_vmap()
