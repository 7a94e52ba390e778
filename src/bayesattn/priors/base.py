"""What all priors over distance share: the interface, the product, and summaries such as spans."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from bayesattn.errors import is_number, is_whole, shown

Kind = Literal["local", "flat", "retrieval", "aggressive retrieval"]

# A head is flat if its log-prior varies by less than this (in nats) over the distances in question.
FLAT_NATS = 0.01
# Odds of exp(-87) vanish in float32: such a head cannot see the query's own token.
RULED_OUT_NATS = -87.0
# More than any model has; beyond that somebody confused two numbers.
MOST_HEADS = 2**16
# A prior over so many tokens takes half a gigabyte a head.
MOST_TOKENS = 2**26


@dataclass(frozen=True)
class HeadSummary:
    """A summary of one head of a prior over `tokens` causal distances."""

    head: int
    kind: Kind
    tokens: int
    span: int
    effective_tokens: float
    parameters: dict[str, float]

    def parameters_text(self) -> str:
        """The parameters that are not NaN, as text: `beta 1, scale 8`."""
        return ", ".join(f"{name} {value:.3g}" for name, value in self.parameters.items() if not math.isnan(value))

    def __str__(self) -> str:
        values = self.parameters_text()
        return (
            f"head {self.head}: {self.kind}; all but 0.1% of {self.tokens} tokens' prior mass within distance "
            f"{self.span}, {self.effective_tokens:.1f} effective tokens{f' ({values})' if values else ''}"
        )


class Prior(nn.Module):
    """A prior over distance for each head, before any content is read.

    A prior maps distances to log-densities, up to a constant per head that softmax cancels:

        prior(distance) -> [num_heads, *distance.shape]

    `distance` is (query position − key position): positive looks back, negative ahead. −inf means a key is never seen.
    A subclass defines `forward` and, for summaries, `human_parameters`. Results are in float32 or better, whatever the
    precision of the parameters: the log-prior of a far key is a large number and its fraction matters.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = check_heads(num_heads)

    def forward(self, distance: Tensor) -> Tensor:
        """Log-density at `distance` (any shape, integer or floating): `[num_heads, *distance.shape]`."""
        raise NotImplementedError

    def human_parameters(self) -> dict[str, Tensor]:
        """The parameters in units a person reasons in (tokens, exponents), each `[num_heads]`."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for a prior of the same structure; its numbers are in `state_dict()`.

        By default the attributes with the names of the constructor's arguments.
        """
        return constructor_settings(self)

    def given(self, states: object) -> NoReturn:
        """An error: a prior over distance alone is the same for every query."""
        raise TypeError(f"{type(self).__name__} does not depend on states; give the prior itself to attention")

    def __mul__(self, other: Prior) -> Prior:
        """The product of two priors: densities multiply, logs add."""
        if not isinstance(other, Prior):
            return NotImplemented
        return Product(self, other)

    @torch.no_grad()
    def log_probability(self, n: int) -> Tensor:
        """Log-prior normalised over the causal distances 0 … n−1, `[num_heads, n]` in float64 on the CPU."""
        if not is_whole(n, 1, MOST_TOKENS):
            raise ValueError(f"n is {shown(n)}; a whole number of tokens from 1 to {MOST_TOKENS:,} is needed")
        tensors = [*self.parameters(), *self.buffers()]
        device = tensors[0].device if tensors else torch.device("cpu")
        precise = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        log_density = self(torch.arange(n, dtype=precise, device=device)).cpu().double()
        if log_density.isnan().any():
            raise ValueError(f"{type(self).__name__} gives NaN; its parameters must be finite")
        return log_density.log_softmax(-1)

    def span(self, mass: float, n: int) -> Tensor:
        """`[num_heads]`: the smallest distance beyond which at most `mass` of the prior over n tokens lies."""
        if not is_number(mass) or not 0.0 <= mass < 1.0:
            raise ValueError(f"mass is {shown(mass)}; the share of the prior left out must be in [0, 1)")
        probability = self.log_probability(n).exp()
        at_least = probability.flip(-1).cumsum(-1).flip(-1)
        return (at_least[:, 1:] > mass).sum(-1)

    def effective_tokens(self, n: int) -> Tensor:
        """`[num_heads]`: 1 / Σ p² over n tokens, the number of equally likely tokens as concentrated as this prior."""
        return (-(2 * self.log_probability(n)).logsumexp(-1)).exp()

    def kinds(self, n: int = 1024) -> list[Kind]:
        """What each head is for, judged by its shape over n tokens.

        *flat*: the log-prior varies by less than 0.01; *local*: the mean distance is shorter than under a uniform
        prior; *retrieval*: it is longer; *aggressive retrieval*: and the query's own token is ruled out in float32.
        """
        log_p = self.log_probability(n)
        peak = log_p.amax(-1)
        flat = peak - log_p.amin(-1) < FLAT_NATS
        mean_distance = log_p.exp() @ torch.arange(n, dtype=log_p.dtype)
        local = mean_distance < (n - 1) / 2
        ruled_out = log_p[:, 0] - peak < RULED_OUT_NATS
        return [
            "flat" if f else "local" if near else "aggressive retrieval" if aggressive else "retrieval"
            for f, near, aggressive in zip(flat.tolist(), local.tolist(), ruled_out.tolist(), strict=True)
        ]

    def describe(self, n: int = 1024) -> list[HeadSummary]:
        """A summary of every head over n tokens; `print(*prior.describe(), sep="\\n")` reads well."""
        values = {name: value.detach().cpu().double().tolist() for name, value in self.human_parameters().items()}
        columns = zip(self.kinds(n), self.span(1e-3, n).tolist(), self.effective_tokens(n).tolist(), strict=True)
        return [
            HeadSummary(head, kind, n, span, effective, {name: column[head] for name, column in values.items()})
            for head, (kind, span, effective) in enumerate(columns)
        ]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class Product(Prior):
    """Two priors at once: log a + log b. `Window(8, 512) * Laplace(8)` is ALiBi within a window of 512 tokens."""

    def __init__(self, first: Prior, second: Prior) -> None:
        for factor in (first, second):
            if not isinstance(factor, Prior):
                raise TypeError(f"a factor of the product is {shown(factor)}; two priors are needed")
        if first.num_heads != second.num_heads:
            raise ValueError(
                f"{type(first).__name__} has {first.num_heads} heads and {type(second).__name__} has "
                f"{second.num_heads}; a product needs the same number of heads in both"
            )
        super().__init__(first.num_heads)
        self.first = first
        self.second = second

    def forward(self, distance: Tensor) -> Tensor:
        log_density: Tensor = self.first(distance) + self.second(distance)
        return log_density

    def human_parameters(self) -> dict[str, Tensor]:
        first, second = self.first.human_parameters(), self.second.human_parameters()
        shared = first.keys() & second.keys()
        return {
            **{(f"first {name}" if name in shared else name): value for name, value in first.items()},
            **{(f"second {name}" if name in shared else name): value for name, value in second.items()},
        }


def constructor_settings(module: nn.Module) -> dict[str, Any]:
    """The attributes with the names of the constructor's arguments."""
    return {name: getattr(module, name) for name in inspect.signature(type(module)).parameters}


def in_working_precision(distance: Tensor, *per_head: Tensor) -> tuple[Tensor, ...]:
    """`distance` and per-head parameters in one dtype, float32 or the widest given, in shapes that broadcast."""
    dtype = torch.float32
    for tensor in (distance, *per_head):
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return distance.to(dtype), *(p.to(dtype).reshape(-1, *[1] * distance.dim()) for p in per_head)


def check_heads(num_heads: object) -> int:
    """The number of heads, or an error."""
    if not is_whole(num_heads, 1, MOST_HEADS):
        raise ValueError(f"num_heads is {shown(num_heads)}; a whole number of heads from 1 to {MOST_HEADS:,} is needed")
    return num_heads  # type: ignore[return-value]


def check_size(name: str, size: object) -> int:
    """The size, or an error."""
    if not is_whole(size, 1, MOST_TOKENS):
        raise ValueError(f"{name} is {shown(size)}; a whole number from 1 to {MOST_TOKENS:,} is needed")
    return size  # type: ignore[return-value]


def check_per_head(name: str, values: object, num_heads: int | None = None) -> Tensor:
    """One finite number per head as float32 `[num_heads]`, or an error."""
    try:
        tensor = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} is {shown(values)}; one number per head is needed") from None
    if tensor.dim() != 1 or len(tensor) != (num_heads or len(tensor)):
        heads = f"{num_heads} heads need {num_heads} numbers" if num_heads else "one number per head is needed"
        raise ValueError(f"{name} has shape {list(tensor.shape)}; {heads}")
    if not tensor.is_meta and not tensor.isfinite().all():
        raise ValueError(f"{name} is {shown(tensor.tolist())}; finite numbers are needed")
    return tensor


def set_per_head(prior: Prior, name: str, value: Tensor, learned: bool) -> None:
    """Give `prior` a per-head parameter, or a buffer if it is not learned."""
    if not isinstance(learned, bool):
        raise TypeError(f"learned is {shown(learned)}; True or False is needed")
    if learned:
        prior.register_parameter(name, nn.Parameter(value.clone()))
    else:
        prior.register_buffer(name, value.clone())
