"""Sinks: the first tokens of a document stay visible whatever their distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bayesattn.errors import UserError, is_number, is_whole, shown
from bayesattn.priors.base import Prior
from bayesattn.priors.conditioned import ConditionedPrior, GivenPrior

# More would be a window at the start of the document, and each query computes all of them.
MOST_SINKS = 2**16
LARGEST_INIT = 1e20


class Sinks(nn.Module):
    """A prior whose first keys are exempt from distance. Pass it to `bayesian_attention` in the place of the prior.

    For query i and key j, the key at place n of its document (counted from 0), and d their distance,

        log p = log_prior[h, n]  if n < count, for every d that is not in the future
                prior(d)         for the other keys

    Trained heads put much of their mass on the first tokens, which no function of distance can express. `log_prior` is
    learned. Like the wrapped prior, it is multiplied by the query scale with `scale_prior` and stands alone without. In
    a document of `count` tokens or fewer, every key is a sink.

    It is a prior over keys and not over distances, so it is no `Prior`: it has no span, cannot be called with distances
    and is no factor of a product. `Sinks(a * b)` is a product with sinks, and `sinks.prior` the part that depends on
    distance.

    Args:
        prior: of the other keys. With a `ConditionedPrior`, `sinks.given(states)` is what attention takes.
        count: sinks of each document.
        init: the log-prior of every sink at the start. 0 is the peak of most priors.
    """

    def __init__(self, prior: Prior | ConditionedPrior, count: int = 4, init: float = 0.0) -> None:
        super().__init__()
        if not isinstance(prior, (Prior, ConditionedPrior)):
            raise TypeError(f"prior is {shown(prior)}; sinks need the prior of the other keys")
        if not is_whole(count, 1, MOST_SINKS):
            raise ValueError(f"count is {shown(count)}; a whole number of sinks from 1 to {MOST_SINKS:,} is needed")
        if not is_number(init) or abs(init) > LARGEST_INIT:
            raise ValueError(f"init is {shown(init)}; a number up to {LARGEST_INIT:g} is needed")
        # Not named `prior`: PEFT takes modules whose names end alike for one, and sinks may hang on a layer as `prior`.
        self.of_others, self.count, self.num_heads = prior, count, prior.num_heads
        self.log_prior = nn.Parameter(torch.full((prior.num_heads, count), float(init)))

    @property
    def prior(self) -> Prior | ConditionedPrior:
        """Of the keys that are no sinks."""
        return self.of_others

    def over(self, prior: Prior | ConditionedPrior) -> Sinks:
        """The same sinks, with the same parameter, over another prior."""
        made = Sinks(prior, self.count)
        made.log_prior = self.log_prior
        return made

    def given(self, states: Tensor) -> GivenSinks:
        """The sinks with the conditioned prior of each query, given its state."""
        return GivenSinks(self.prior.given(states), self.log_prior)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for sinks of the same structure; their numbers are in `state_dict()`."""
        return {"prior": self.prior, "count": self.count}

    def forward(self, *_: object, **__: object) -> NoReturn:
        """An error: the log-prior of a sink is no function of distance. The summaries of a `Prior` raise it too."""
        raise UserError(
            "Sinks is no function of distance, since the first keys have a log-prior of their own; give it to "
            "attention, or use its .prior for the other keys"
        )

    log_probability = span = effective_tokens = kinds = describe = human_parameters = forward

    def __mul__(self, other: object) -> NoReturn:
        raise TypeError("Sinks is no factor of a product; write Sinks(a * b) for a product with sinks")

    __rmul__ = __mul__

    def extra_repr(self) -> str:
        return f"count={self.count}"


def without_sinks(prior: Prior | ConditionedPrior | Sinks) -> Prior | ConditionedPrior:
    """The prior of the keys that are no sinks."""
    return prior.prior if isinstance(prior, Sinks) else prior


@dataclass(frozen=True)
class GivenSinks:
    """Sinks over a conditioned prior whose states are given, or over a table of log-priors by distance."""

    prior: GivenPrior | Tensor
    log_prior: Tensor  # [H, count]

    def queries(self, chosen: slice) -> GivenSinks:
        """The same for some of the queries."""
        assert isinstance(self.prior, GivenPrior)  # a table is the same for all
        return replace(self, prior=self.prior.queries(chosen))
