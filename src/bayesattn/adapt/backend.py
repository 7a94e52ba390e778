"""`attn_implementation="bayesattn"`: our attention for the models of transformers.

Importing this module registers the attention function and its mask function. Without the second, transformers would
pass no mask at all.

Shape letters: B batch, H query heads, G key/value heads, M queries, N keys, D head size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from bayesattn.adapt.cache import attend_with_cache, cache_of
from bayesattn.adapt.extension import extension_of
from bayesattn.adapt.layout import INSTEAD, NAME, OTHER_MASK, Layout, make_layout
from bayesattn.adapt.parts import prior_of, scales_prior, temperature_of
from bayesattn.adapt.softcap import attend_softcapped
from bayesattn.attention import attention_with_lse, bayesian_attention
from bayesattn.attention.inputs import make_problem
from bayesattn.errors import UserError
from bayesattn.models.variants import VARIANTS
from bayesattn.priors import GivenSinks, Sinks


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Layout | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of the implementation `bayesattn`, exact and of linear memory.

    It is `bayesian_attention` with the prior and the temperature that `add_prior` has hung on the module, and plain
    attention without them. Keys beyond the model's sliding window have no weight. Each query's temperature is that of
    the keys it sees, so no more than the window has.

    Args:
        module: the attention layer.
        query: `[B, H, M, D]`, at the last positions of the keys.
        key: `[B, G, N, D]`; G divides H.
        value: `[B, G, N, E]`.
        attention_mask: what `make_layout` returned, or None for all keys, or all up to the query.
        dropout: must be 0.
        scaling: 1/√D by default.
        is_causal: without an attention mask, whether keys after the query are hidden; by default as the module says.
        softcap: content logits are capped at ± this, before the prior is added.
        s_aux: `[H]`, logits of a sink that takes weight and has no value.

    Returns:
        `[B, M, H, E]`, and None for the weights, which are never written out.

    Raises:
        UserError: for dropout, a position bias, attention weights that are asked for, cross attention, a paged cache,
            and masks that are not made of documents, padding and a window.
    """
    layout = attention_mask
    if layout is None:
        layout = Layout(key.shape[2], causal=getattr(module, "is_causal", True) if is_causal is None else is_causal)
    cache = cache_of(key)
    keys = layout.num_keys if cache is not None and isinstance(layout, Layout) else key.shape[2]
    _check(module, query.shape[2], keys, layout, dropout, position_bias, others)
    if cache is not None:
        if softcap is not None or s_aux is not None:
            raise UserError("softcap and sinks need all keys; generate without a cache from make_cache()")
        out = attend_with_cache(module, cache, query, key, value, layout, scaling)
        return out.transpose(1, 2).contiguous(), None
    settings: dict[str, Any] = {
        "query_scale": temperature_of(module, layout.window),
        "scale_prior": scales_prior(module),
        "causal": layout.causal,
        "softmax_scale": scaling,
        "document_ids": layout.document_ids,
    }
    prior = prior_of(module)
    if isinstance(prior, Sinks) and softcap is not None:
        raise UserError(f"{type(module).__name__} has softcap, with which Sinks do not work; leave that layer out")
    table = _table(module, prior.prior if isinstance(prior, Sinks) else prior, query, layout)
    log_prior: Any = table
    if isinstance(prior, Sinks) and table is not None:
        if layout.window is not None and query.shape[2] < key.shape[2]:
            raise UserError(
                "the cache of a layer with a sliding window drops the first tokens, which the sinks are; generate with "
                "past_key_values=model.make_cache()"
            )
        log_prior = GivenSinks(table, prior.log_prior)
    extension = extension_of(module)
    if extension is not None:
        if softcap is not None or s_aux is not None or isinstance(prior, Sinks) or not layout.causal:
            raise UserError(
                f"{type(module).__name__} has softcap or sinks or looks ahead; layers like that cannot be extended"
            )
        out = extension.attend(
            query, key, value, table, layout, temperature=settings["query_scale"],
            scale_prior=settings["scale_prior"], softmax_scale=scaling,
        )  # fmt: skip
    elif softcap is not None:
        if s_aux is not None:
            raise UserError(f"{NAME!r} cannot have softcap and sinks in one layer; {INSTEAD}")
        out = attend_softcapped(make_problem(query, key, value, log_prior, **settings), softcap)
    elif s_aux is not None:
        out, lse = attention_with_lse(query, key, value, log_prior, **settings)
        share = torch.sigmoid(lse - s_aux.to(lse.dtype).reshape(-1, 1))
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    else:
        out = bayesian_attention(query, key, value, log_prior, **settings)
    return out.transpose(1, 2).contiguous(), None


def _check(
    module: nn.Module,
    queries: int,
    keys: int,
    layout: Layout | Tensor,
    dropout: float,
    position_bias: Tensor | None,
    others: dict[str, Any],
) -> None:
    if not isinstance(layout, Layout) or layout.is_other:
        raise UserError(OTHER_MASK)
    if layout.num_keys != keys or queries > keys or (queries < keys and not layout.causal):
        raise UserError(
            f"{queries} queries attend to {keys} keys with a mask for {layout.num_keys}; {NAME!r} is for the attention "
            f"of a text to itself, {INSTEAD}"
        )
    if dropout > 0:
        raise UserError(f"attention_dropout is {dropout:g}; {NAME!r} has none, set attention_dropout to 0 to train")
    if position_bias is not None:
        raise UserError(f"{type(module).__name__} has a position bias of its own, which {NAME!r} lacks; {INSTEAD}")
    if others.get("output_attentions"):
        raise UserError(f"{NAME!r} never writes attention weights out; use attn_implementation='eager' to see them")
    if others.get("cache") is not None:
        raise UserError(f"{NAME!r} cannot read a paged cache; call generate() instead of generate_batch()")


def _table(module: nn.Module, prior: Callable[[Tensor], Tensor] | None, query: Tensor, layout: Layout) -> Tensor | None:
    """The log-prior of the distances that occur, −inf beyond the window; None for a uniform prior over all keys."""
    if prior is None and layout.window is None:
        return None
    distance = torch.arange(0 if layout.causal else 1 - layout.num_keys, layout.num_keys, device=query.device)
    if prior is None:
        table = torch.zeros(query.shape[1], len(distance), device=query.device)
    else:
        # Called as a function, so that what wraps it, as PEFT does, has its say.
        table = prior(distance.double() if query.dtype == torch.float64 else distance)
        if len(table) != query.shape[1]:
            raise UserError(
                f"the prior has {len(table)} heads and {type(module).__name__} {query.shape[1]}; they must agree"
            )
    if layout.window is not None:
        table = table.masked_fill(distance.abs() >= layout.window, -torch.inf)
    return table


def _extend(model: Any, window: int) -> Any:
    """The model of `NAME+clip:WINDOW`."""
    from bayesattn.adapt.extend import extend_any

    return extend_any(model, window)


@contextmanager
def attend_with(function: Callable[..., Any]) -> Iterator[None]:
    """Let models call this function, with the arguments of `attend`, in its place. For measurements."""
    AttentionInterface.register(NAME, function)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)


AttentionInterface.register(NAME, attend)
VARIANTS["clip"] = _extend
AttentionMaskInterface.register(NAME, make_layout)
