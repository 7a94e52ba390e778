"""The generalized Gaussian prior of BAM: one family from Gaussian through Laplace and flat to anti-local."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesattn.errors import is_number, shown
from bayesattn.priors.base import Kind, Prior, check_per_head, in_working_precision, set_per_head
from bayesattn.priors.laplace import alibi_slopes

Initialisation = Literal["zeros", "alibi", "spread", "linear", "sampled"]

# Trained retrieval heads form two clusters. This separates them.
AGGRESSIVE_BETA = -0.6
# A density of exp(−exp(60)) is zero in any precision; larger powers would overflow and make the gradient NaN.
LARGEST_EXPONENT = 60.0
# `spread` gives every head this scale, in tokens.
SPREAD_SCALE = 8.0


class GeneralizedGaussian(Prior):
    """log p(d) = −exp(θ_α) · (|d + μ| + ε)^θ_β with μ = 2·sinh θ_μ, per head.

    θ_β can have any sign: 2 is a Gaussian, 1 a Laplace, between 0 and 1 heavy-tailed, 0 flat. Below 0 near tokens are
    suppressed and far ones are not, which makes a retrieval head. d is query minus key position, so the centre of the
    prior lies −μ tokens back (the authors define μ as key minus query).

    Args:
        num_heads: heads, each with its own θ_α, θ_β, θ_μ.
        init: `zeros`: θ_α = θ_β = 0, flat, the published best. `alibi`: θ_β = 1 with ALiBi's slopes.
            `spread`: θ_β evenly from 1 to −1 over the heads, all with a scale of 8 tokens: −(d/8)^β. `linear` and
            `sampled` are options of the authors' code: θ_β evenly from 0 to 1 with θ_α = 0; and θ_β normal with
            θ_α = exp(z), z normal too.
        learn: which of `alpha`, `beta`, `mu` are trained; the others are buffers.
        epsilon: keeps the power finite at distance 0. The published 1e-5 lets β = −1 rule out the query's own token
            (−1e5 nats); 1 keeps it at −exp(θ_α).
    """

    theta_alpha: Tensor
    theta_beta: Tensor
    theta_mu: Tensor

    def __init__(
        self,
        num_heads: int,
        init: Initialisation = "zeros",
        learn: Collection[str] = ("alpha", "beta"),
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__(num_heads)
        if not is_number(epsilon) or not 1e-30 <= epsilon <= 1e30:  # what float32 can hold
            raise ValueError(f"epsilon is {shown(epsilon)}; a number from 1e-30 to 1e30 is needed")
        names = ("alpha", "beta", "mu")
        if not isinstance(learn, Collection) or isinstance(learn, str) or not all(name in names for name in learn):
            raise ValueError(f"learn is {shown(learn)}; a collection of 'alpha', 'beta' and 'mu' is needed")
        zeros = torch.zeros(num_heads)
        if init == "zeros":
            theta_alpha, theta_beta = zeros, zeros
        elif init == "alibi":
            theta_alpha, theta_beta = alibi_slopes(num_heads).log(), torch.ones(num_heads)
        elif init == "spread":
            theta_beta = torch.linspace(1, -1, num_heads)
            theta_alpha = -theta_beta * math.log(SPREAD_SCALE)
        elif init == "linear":
            theta_alpha, theta_beta = zeros, torch.linspace(0, 1, num_heads)
        elif init == "sampled":
            theta_alpha, theta_beta = torch.randn(num_heads).exp(), torch.randn(num_heads)
        else:
            *others, last = get_args(Initialisation)
            raise ValueError(f"init is {shown(init)}; {', '.join(map(repr, others))} and {last!r} are allowed")
        self.epsilon = epsilon
        set_per_head(self, "theta_alpha", theta_alpha, "alpha" in learn)
        set_per_head(self, "theta_beta", theta_beta, "beta" in learn)
        set_per_head(self, "theta_mu", zeros, "mu" in learn)

    @classmethod
    def from_shape(
        cls,
        beta: Sequence[float],
        scale: Sequence[float],
        centre: Sequence[float] | None = None,
        learn: Collection[str] = ("alpha", "beta"),
        epsilon: float = 1e-5,
    ) -> GeneralizedGaussian:
        """Heads given in human units: log p(d) = −((|d − centre| + ε) / scale)^beta, scale and centre in tokens."""
        betas = check_per_head("beta", beta)
        prior = cls(len(betas), learn=learn, epsilon=epsilon)
        scales = check_per_head("scale", scale, len(betas))
        centres = torch.zeros_like(betas) if centre is None else check_per_head("centre", centre, len(betas))
        if not scales.is_meta and not (scales > 0).all():
            raise ValueError(f"scale is {shown(scales.tolist())}; scales are positive numbers of tokens")
        with torch.no_grad():
            prior.theta_beta.copy_(betas)
            prior.theta_alpha.copy_(-betas * scales.log())
            prior.theta_mu.copy_(torch.asinh(-centres / 2))
        return prior

    def forward(self, distance: Tensor) -> Tensor:
        distance, theta_alpha, theta_beta, theta_mu = in_working_precision(
            distance, self.theta_alpha, self.theta_beta, self.theta_mu
        )
        from_centre = (distance + 2 * theta_mu.sinh()).abs() + self.epsilon
        return -(theta_alpha + theta_beta * from_centre.log()).clamp(max=LARGEST_EXPONENT).exp()

    def kinds(self, n: int = 1024) -> list[Kind]:
        """As for any prior, but β decides for heads with centre 0 that are not flat.

        β > 0 is local, −0.6 … 0 is retrieval, and below that is aggressive retrieval.
        """
        by_beta: list[Kind] = [
            "local" if beta > 0 else "retrieval" if beta > AGGRESSIVE_BETA else "aggressive retrieval"
            for beta in self.theta_beta.tolist()
        ]
        centred = (self.theta_mu == 0).tolist()
        by_shape = super().kinds(n)
        return [
            named if here and kind != "flat" else kind
            for kind, named, here in zip(by_shape, by_beta, centred, strict=True)
        ]

    def settings(self) -> dict[str, Any]:
        learned = [name for name in ("alpha", "beta", "mu") if f"theta_{name}" in self._parameters]
        return {"num_heads": self.num_heads, "learn": learned, "epsilon": self.epsilon}

    def human_parameters(self) -> dict[str, Tensor]:
        """`beta`, `scale` and, unless it is 0 for all heads, `centre` in tokens back.

        `scale` is the distance with log-prior −1. It is NaN at β = 0, where there is none.
        """
        theta_alpha, theta_beta = self.theta_alpha.cpu().double(), self.theta_beta.cpu().double()
        scale = torch.where(theta_beta == 0, torch.nan, (-theta_alpha / theta_beta).exp())
        centre = {"centre": -2 * self.theta_mu.sinh()} if self.theta_mu.any() else {}
        return {"beta": self.theta_beta, "scale": scale, **centre}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, epsilon={self.epsilon}"
