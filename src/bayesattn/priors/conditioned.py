"""Priors over distance that depend on the query: each query reads its own from the hidden states.

A family has two parts. A module makes a few parameters for every query from its state. A pure function, `rows`, makes
log-priors of distances from these. Attention evaluates it for the tile at hand, forward and backward, so that nothing
of the size queries × keys is ever kept.

Shape letters: B sequences, H heads, M queries, P parameters of a query; h, m, n those of a tile, x distances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesattn.priors.base import Prior, Product, check_heads, constructor_settings

_FAMILIES: dict[str, type[ConditionedPrior]] = {}


class ConditionedPrior(nn.Module):
    """A prior over distance for each query, made from its state.

    `prior.given(states)` is what `bayesian_attention` takes in the place of a prior:

        log_prior_bhi(d) = rows(parameters of query i, shared, d)    with    parameters = prior(states)

    A subclass defines `forward` and `rows`. Gradients come by themselves: attention differentiates `rows` with respect
    to the parameters and the shared tensors, and autograd goes on from there. A product with a `Prior`, such as
    `ProfileBank(8, 512) * Window(8, 1024)`, adds the logs; only that prior may hide keys.
    """

    elementwise: ClassVar[bool] = True
    """Whether `rows` treats each distance alone, so that every query may come with distances of its own. Otherwise all
    queries of a tile come with the same distances, which suits a matrix product."""
    reads: Literal["states", "positions"] = "states"
    """What `forward` takes: the states of the queries, or their positions, counted from the start of each document."""
    family: ClassVar[str] = ""
    """The name under which attention finds the class."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        name = base = f"{cls.__module__}.{cls.__qualname__}"
        number = 1
        while name in _FAMILIES:  # a class that is defined again, in a notebook for example
            number += 1
            name = f"{base}#{number}"
        cls.family = name
        _FAMILIES[name] = cls

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = check_heads(num_heads)

    def forward(self, states: Tensor) -> Tensor:
        """The parameters of each query, `[B or 1, H or 1, M, P]`, from what it depends on, usually `[B, M, width]`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward; define it to make parameters of the states")

    def shared(self) -> tuple[Tensor, ...]:
        """Tensors that `rows` needs besides: the first dimension of each is the heads, or 1 for what heads share."""
        return ()

    @staticmethod
    def rows(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor:
        """Finite log-priors, `[B, h, m, n]`, of some queries and heads; a pure function.

        Args:
            parameters: `[B, h, m, P]`, or with 1 for B or h where `forward` has that, in float32 or float64.
            shared: those of the heads at hand.
            distances: query position − key position, in the dtype of the parameters. `[m, n]` for an elementwise
                family, a row for each query; otherwise `[n]`, the same for all queries. Negative ones are ahead.
        """
        raise NotImplementedError("the family has no rows; define them as a static method")

    @staticmethod
    def extent(shared: tuple[Tensor, ...]) -> int | None:
        """The number E of distances 0 … E − 1 outside of which `rows` is 0; None if there is no such number."""
        return None

    @staticmethod
    def simplify(parameters: Tensor, shared: tuple[Tensor, ...], nearest: int, farthest: int) -> tuple[Tensor, ...]:
        """Shared tensors with which `rows` has the same values, in less time, at distances `nearest` … `farthest`.

        Differentiable in the shared tensors; it may look at values, and is not called where that would take long.
        """
        return shared

    @staticmethod
    def highest(parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor) -> Tensor | None:
        """Upper bounds of `rows` over sets of neighbouring distances `[z, n]`, for each query `[B, h, m, z]`.

        Pruning needs it. None if the family has none: then only what a static factor hides is left out.
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for a prior of the same structure; its numbers are in `state_dict()`.

        By default the attributes with the names of the constructor's arguments.
        """
        return constructor_settings(self)

    @property
    def static_factor(self) -> Prior | None:
        """The factor that is the same for all queries, if there is one."""
        return None

    def given(self, states: Tensor) -> GivenPrior:
        """The prior of each query, given its state."""
        return self.with_parameters(self(states))

    def with_parameters(self, parameters: Tensor) -> GivenPrior:
        """The prior of queries with these parameters, which `forward` has made."""
        return GivenPrior(type(self), self.num_heads, parameters, self.shared())

    def __mul__(self, other: Prior) -> ConditionedProduct:
        """The product with a static prior: logs add."""
        _check_is_static(type(self).__name__, other)
        return ConditionedProduct(self, other) if isinstance(other, Prior) else NotImplemented

    __rmul__ = __mul__


@dataclass(frozen=True)
class GivenPrior:
    """The prior of each query: a conditioned prior whose states are given."""

    family: type[ConditionedPrior]
    num_heads: int
    parameters: Tensor  # [B or 1, H or 1, M, P]
    shared: tuple[Tensor, ...] = ()
    static: Prior | Tensor | None = None  # the factor that all queries share, as `bayesian_attention` takes it

    def __mul__(self, other: Prior) -> GivenPrior:
        """The product with a static prior."""
        _check_is_static(self.family.__name__, other)
        if not isinstance(other, Prior) or isinstance(self.static, Tensor):
            return NotImplemented
        _check_same_heads(self.family.__name__, self.num_heads, other)
        return replace(self, static=other if self.static is None else Product(self.static, other))

    __rmul__ = __mul__

    def heads(self, chosen: slice | Tensor, static: Tensor) -> GivenPrior:
        """The prior of some of the heads, with a table as its static factor, `[heads, n]`."""
        one = self.parameters.shape[1] == 1
        return GivenPrior(
            self.family,
            len(static),
            self.parameters if one else self.parameters[:, chosen],
            tuple(x if len(x) == 1 else x[chosen] for x in self.shared),
            static,
        )

    def queries(self, chosen: slice) -> GivenPrior:
        """The prior of some of the queries."""
        return replace(self, parameters=self.parameters[:, :, chosen])

    def last(self, number: int) -> GivenPrior:
        """The prior of the last queries."""
        return self.queries(slice(self.parameters.shape[2] - number, None))

    def log_prior(self, distance: Tensor) -> Tensor:
        """The log-prior of each query at the distances `[n]`, or at its own `[M, n]`: `[B or 1, H, M, n]`."""
        parameters = self.parameters.to(torch.promote_types(self.parameters.dtype, torch.float32))
        shared = tuple(x.to(parameters.dtype) for x in self.shared)
        if isinstance(self.static, Tensor):
            raise TypeError("the static factor is a table; evaluate it at the distances itself")
        by_query = distance.to(parameters.dtype).expand(parameters.shape[2], -1)
        if self.family.elementwise:
            rows = evaluate_rows(self.family, parameters, shared, by_query)
        else:
            each, place = by_query.unique(return_inverse=True)
            rows = evaluate_rows(self.family, parameters, shared, each)
            rows = rows.gather(-1, place.expand(*rows.shape[:2], -1, -1))
        rows = rows.expand(-1, self.num_heads, -1, -1)
        return rows if self.static is None else rows + self.static(by_query)


class ConditionedProduct(ConditionedPrior):
    """A conditioned prior times a static one: log a + log b. `Window` as the static one hides far keys."""

    def __init__(self, conditioned: ConditionedPrior, static: Prior) -> None:
        _check_same_heads(type(conditioned).__name__, conditioned.num_heads, static)
        super().__init__(conditioned.num_heads)
        self.conditioned = conditioned
        self.static = static
        self.reads = conditioned.reads

    def forward(self, states: Tensor) -> Tensor:
        parameters: Tensor = self.conditioned(states)
        return parameters

    def shared(self) -> tuple[Tensor, ...]:
        return self.conditioned.shared()

    @property
    def static_factor(self) -> Prior:
        inner = self.conditioned.static_factor
        return self.static if inner is None else Product(inner, self.static)

    def with_parameters(self, parameters: Tensor) -> GivenPrior:
        return self.conditioned.with_parameters(parameters) * self.static


def find_family(name: str) -> type[ConditionedPrior]:
    """The class of this name."""
    return _FAMILIES[name]


def evaluate_rows(
    family: type[ConditionedPrior], parameters: Tensor, shared: tuple[Tensor, ...], distances: Tensor
) -> Tensor:
    """`family.rows`, or an error if its shape does not fit."""
    rows = family.rows(parameters, shared, distances)
    batch, _, queries, _ = parameters.shape
    columns = distances.shape[-1]
    if rows.dim() != 4 or rows.shape[0] not in (1, batch) or rows.shape[2:] != (queries, columns):
        raise ValueError(
            f"{family.__name__}.rows returned shape {list(rows.shape)} for parameters {list(parameters.shape)} and "
            f"{columns} distances; [batch, heads, {queries}, {columns}] is needed"
        )
    return rows


def check_states(family: str, states: object, width: int) -> Tensor:
    """The states `[B, M, width]`, or an error."""
    if not isinstance(states, Tensor) or not states.is_floating_point():
        given = states.dtype if isinstance(states, Tensor) else type(states).__name__
        raise TypeError(f"{family} got states of the kind {given}; a floating-point tensor is needed")
    if states.dim() != 3 or states.shape[-1] != width:
        raise ValueError(f"{family} got states of shape {list(states.shape)}; [batch, queries, {width}] is needed")
    return states


def _check_is_static(name: str, other: object) -> None:
    if isinstance(other, (ConditionedPrior, GivenPrior)):
        second = other.family.__name__ if isinstance(other, GivenPrior) else type(other).__name__
        raise TypeError(
            f"{name} and {second} both depend on the query; a product has one such prior, and its other factors are "
            "static"
        )


def _check_same_heads(name: str, num_heads: int, static: Prior) -> None:
    if static.num_heads != num_heads:
        raise ValueError(
            f"{name} has {num_heads} heads and {type(static).__name__} has {static.num_heads}; a product needs the "
            "same number of heads in both"
        )
