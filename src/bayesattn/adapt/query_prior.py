"""The log-prior of the queries at hand, for the attention function.

A prior that depends on the query is made from the input of its attention layer, which the attention function never
sees. A hook hands that input on as one more keyword argument, since layers of transformers pass keyword arguments that
they do not know to their attention function. Nothing is kept between calls, so checkpointing and compilation see a
function of its inputs.

Shape letters: B batch, H query heads, M queries, C width of a layer's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.adapt.layout import Layout
from bayesattn.adapt.own_bias import own_prior
from bayesattn.adapt.parts import hooks_of, prior_of
from bayesattn.attention import visible_counts
from bayesattn.errors import UserError
from bayesattn.priors import ConditionedPrior, GivenSinks, Prior, Sinks
from bayesattn.priors.conditioned import ConditionedProduct
from bayesattn.priors.sinks import without_sinks

# The argument with which a layer gets its input, and the one with which its attention function gets it.
INPUT, STATES = "hidden_states", "prior_states"
DROPPED = (
    "the cache of a layer with a sliding window drops the first tokens, {why}; generate with "
    "past_key_values=model.make_cache()"
)


TWO_PRIORS = (
    "{layer} has a prior of its own that depends on the query, and a product has one such factor; add a prior of "
    "distance alone, or give position='drop'"
)


def reads_states(prior: Prior | ConditionedPrior | Sinks) -> bool:
    """Whether the prior is made from the states of each query."""
    inner = without_sinks(prior)
    return isinstance(inner, ConditionedPrior) and inner.reads == "states"


def check_states(layer: nn.Module, prior: Prior | ConditionedPrior | Sinks) -> None:
    """Raise an error if the prior needs states, and the layer cannot hand them on or has others."""
    if not reads_states(prior):
        return
    inner, name = without_sinks(prior), type(layer).__name__
    while isinstance(inner, ConditionedProduct):
        inner = inner.conditioned
    given = inspect.signature(type(layer).forward).parameters
    if INPUT not in given or not any(each.kind is each.VAR_KEYWORD for each in given.values()):
        raise UserError(
            f"{name} does not hand its states on to its attention function, and {type(inner).__name__} depends on "
            "them; add a prior of distance alone"
        )
    wanted, width = getattr(inner, "width", None), _input_width(layer)
    if wanted is not None and width is not None and wanted != width:
        raise UserError(f"{type(inner).__name__} reads states of width {wanted}, and those of {name} have {width}")


def pass_states(layer: nn.Module) -> None:
    """Let the layer's attention function get the layer's input."""
    if not hooks_of(layer, _with_states):
        layer.register_forward_pre_hook(_with_states, with_kwargs=True)


def stop_states(layer: nn.Module) -> None:
    """The attention function no longer gets the input."""
    for number in hooks_of(layer, _with_states):
        del layer._forward_pre_hooks[number], layer._forward_pre_hooks_with_kwargs[number]


def log_prior_of(
    module: nn.Module, query: Tensor, num_keys: int, layout: Layout, states: Tensor | None, bias: Tensor | None
) -> Any:
    """What `bayesian_attention` takes as the log-prior of a layer's queries; None for a uniform one over all keys.

    The bias is that of a layer which has a prior of its own; the two are multiplied. The log-prior is −inf beyond the
    model's own window. Sinks are seen there too.
    """
    prior = prior_of(module)
    inner = prior.prior if isinstance(prior, Sinks) else prior
    keys_are_dropped = layout.window is not None and query.shape[2] < num_keys
    given, static = own_prior(module, bias), inner
    if isinstance(inner, ConditionedPrior):
        if given is not None:
            raise UserError(TWO_PRIORS.format(layer=type(module).__name__))
        if inner.reads == "positions" and keys_are_dropped:
            raise UserError(DROPPED.format(why=f"from which {type(inner).__name__} counts"))
        positions = lambda: _positions(query.shape[2], layout, query.device)  # noqa: E731
        given = inner.with_parameters(parameters_of(module, inner, states, positions))
        static = given.static
    elif states is not None:
        raise UserError(f"the prior is wrapped in a {type(inner).__name__}; take it out of that first")
    table = table_of(module, static, query, layout)
    log_prior: Any = table if given is None else replace(given, static=table)
    if not isinstance(prior, Sinks) or log_prior is None:
        return log_prior
    if keys_are_dropped:
        raise UserError(DROPPED.format(why="which the sinks are"))
    return GivenSinks(log_prior, prior.log_prior)


def parameters_of(
    module: nn.Module, prior: ConditionedPrior, states: Tensor | None, positions: Callable[[], Tensor]
) -> Tensor:
    """The parameters of each query, from the states `[B, M, C]` of a layer or from positions `[M]` or `[B, M]`."""
    if prior.reads == "positions":
        parameters: Tensor = prior(positions())
        return parameters
    if states is None:
        raise UserError(f"{type(module).__name__} did not hand its states on, which {type(prior).__name__} depends on")
    own = next(prior.parameters(), states)  # in float32 if the model was loaded in half precision
    parameters = prior(states.to(own.dtype))
    return parameters


def _with_states(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, STATES: args[0] if args else kwargs[INPUT]}


def _input_width(layer: nn.Module) -> int | None:
    """The width of a layer's input: that of its first projection, or of its configuration."""
    for child in layer.children():
        if isinstance(child, nn.Linear):
            return child.in_features
    return getattr(getattr(layer, "config", None), "hidden_size", None)


def _positions(num_queries: int, layout: Layout, device: torch.device) -> Tensor:
    """Places of the queries in their documents, from 0."""
    counts = visible_counts(num_queries, layout.num_keys, document_ids=layout.document_ids, device=device)
    return (counts - 1).clamp(min=0)


def table_of(module: nn.Module, prior: Any, query: Tensor, layout: Layout) -> Tensor | None:
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
