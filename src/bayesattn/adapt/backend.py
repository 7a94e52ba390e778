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
from bayesattn.adapt.own_bias import gives_mixture, has_own_bias
from bayesattn.adapt.parts import scales_prior, temperature_of
from bayesattn.adapt.query_prior import log_prior_of
from bayesattn.adapt.softcap import WITH_SOFTCAP, attend_softcapped
from bayesattn.attention import attention_with_lse, bayesian_attention
from bayesattn.attention.inputs import make_problem
from bayesattn.errors import UserError
from bayesattn.models.variants import VARIANTS
from bayesattn.priors import GivenSinks


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
    prior_states: Tensor | None = None,
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
        position_bias: of Inkling, when `add_prior` has changed it to the mixture of its profiles.
        prior_states: `[B, M, C]`, the layer's input, from which a prior that depends on the query is made.

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
        out = attend_with_cache(module, cache, query, key, value, layout, scaling, prior_states)
        return out.transpose(1, 2).contiguous(), None
    settings: dict[str, Any] = {
        "query_scale": temperature_of(module, layout.window),
        "scale_prior": scales_prior(module),
        "causal": layout.causal,
        "softmax_scale": scaling,
        "document_ids": layout.document_ids,
    }
    log_prior = log_prior_of(module, query, key.shape[2], layout, prior_states, position_bias)
    extension = extension_of(module)
    if extension is not None:
        if softcap is not None or s_aux is not None or isinstance(log_prior, GivenSinks) or not layout.causal:
            raise UserError(
                f"{type(module).__name__} has softcap, or sinks, or looks ahead; such layers cannot be extended"
            )
        if log_prior is not None and not isinstance(log_prior, Tensor):
            raise UserError(
                f"{type(module).__name__} has a prior that depends on the query; layers like that cannot be extended"
            )
        out = extension.attend(
            query, key, value, log_prior, layout, temperature=settings["query_scale"],
            scale_prior=settings["scale_prior"], softmax_scale=scaling,
        )  # fmt: skip
    elif softcap is not None:
        if s_aux is not None:
            raise UserError(f"{NAME!r} cannot have softcap and sinks in one layer; {INSTEAD}")
        if isinstance(log_prior, GivenSinks):
            raise UserError(WITH_SOFTCAP.format(layer=type(module).__name__))
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
    if position_bias is not None and not gives_mixture(module):
        instead = "bayesattn.add_prior(model, prior) reads it" if has_own_bias(module) else INSTEAD
        raise UserError(f"{type(module).__name__} has a position bias of its own, which {NAME!r} lacks; {instead}")
    if others.get("output_attentions"):
        raise UserError(f"{NAME!r} never writes attention weights out; use attn_implementation='eager' to see them")
    if others.get("cache") is not None:
        raise UserError(f"{NAME!r} cannot read a paged cache; call generate() instead of generate_batch()")


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
