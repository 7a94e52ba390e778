"""Probability laws of tokens, with attention over the whole law in closed form.

Attention with logits b·y over a law is the mean of the law tilted by exp(b·y). It is known exactly for Gaussians, their
mixtures and the sphere (docs/convergence.md). So errors are measured against the exact limit, not a larger sample.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from bayesattn.errors import UserError

# The published experiments have 50 dimensions, each of variance 0.1.
DIMENSION, VARIANCE = 50, 0.1
# Draws for a Monte Carlo mean over the law.
DRAWS = 200_000
# Terms of the continued fraction of a Bessel ratio, besides one per unit of its argument.
LEAST_TERMS = 40


def generator_for(seed: int, purpose: str, number: int = 0) -> Generator:
    """A random generator for one purpose; other purposes under the same seed get independent numbers."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {purpose} {number}".encode()))


class Law(Protocol):
    """A probability law of tokens."""

    @property
    def dimension(self) -> int: ...

    def draw(self, n: int, generator: Generator) -> Tensor:
        """Tokens `[n, d]` in float32."""
        ...

    def tilted_mean(self, b: Tensor) -> Tensor:
        """E[y exp(b·y)] / E[exp(b·y)] for each row of b `[m, d]`."""
        ...

    def covariance(self) -> Tensor:
        """Covariance of a token, `[d, d]` in float64."""
        ...


@dataclass(frozen=True)
class Mixture:
    """A mixture of equally likely Gaussians with means `[c, d]` and the same variance in all directions."""

    means: Tensor
    variance: float = VARIANCE

    @property
    def dimension(self) -> int:
        return self.means.shape[1]

    def draw(self, n: int, generator: Generator) -> Tensor:
        noise = torch.randn(n, self.dimension, generator=generator) * self.variance**0.5
        if len(self.means) == 1:
            return noise + self.means[0].float()
        chosen = torch.randint(len(self.means), (n,), generator=generator)
        return noise + self.means[chosen].float()

    def tilted_mean(self, b: Tensor) -> Tensor:
        # Tilting moves each Gaussian by Σb and weights it by exp(b·mean); exp(b·Σb/2) is the same for all.
        weight = (b @ self.means.to(b).T).softmax(-1)
        return weight @ self.means.to(b) + self.variance * b

    def covariance(self) -> Tensor:
        centred = (self.means - self.means.mean(0)).double()
        return centred.T @ centred / len(self.means) + self.variance * torch.eye(self.dimension, dtype=torch.float64)


@dataclass(frozen=True)
class Sphere:
    """The uniform law on a sphere."""

    dimension: int
    radius: float

    def draw(self, n: int, generator: Generator) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(n, self.dimension, generator=generator)) * self.radius

    def tilted_mean(self, b: Tensor) -> Tensor:
        strength = b.norm(dim=-1, keepdim=True) * self.radius
        return self.radius * bessel_ratio(self.dimension / 2, strength) * torch.nn.functional.normalize(b)

    def covariance(self) -> Tensor:
        return torch.eye(self.dimension, dtype=torch.float64) * self.radius**2 / self.dimension


def gaussian(dimension: int = DIMENSION, variance: float = VARIANCE) -> Mixture:
    return Mixture(torch.zeros(1, _check_dimension(dimension)), variance)


def sphere(dimension: int = DIMENSION, variance: float = VARIANCE) -> Sphere:
    """The sphere whose uniform law has this variance in each direction."""
    return Sphere(_check_dimension(dimension), math.sqrt(variance * dimension))


def mixture(dimension: int = DIMENSION, variance: float = VARIANCE, components: int = 4, seed: int = 0) -> Mixture:
    """A mixture with random means, as far from each other as two tokens of one component."""
    means = torch.randn(components, _check_dimension(dimension), generator=generator_for(seed, "mixture"))
    return Mixture(means * variance**0.5, variance)


LAWS: dict[str, Callable[..., Mixture | Sphere]] = {"gaussian": gaussian, "sphere": sphere, "mixture": mixture}


def _check_dimension(dimension: int) -> int:
    if not 2 <= dimension <= 4096:
        raise UserError(f"the dimension of tokens is {dimension}; 2 to 4096 are allowed")
    return dimension


def bessel_ratio(order: float, x: Tensor) -> Tensor:
    """I_order(x) / I_(order − 1)(x) of the modified Bessel functions, by a continued fraction evaluated backwards."""
    x = x.double().clamp(min=1e-12)
    with torch.no_grad():
        ratio = torch.zeros_like(x)
        for step in range(LEAST_TERMS + int(x.max()), -1, -1):
            ratio = 1 / (2 * (order + step) / x + ratio)
        slope = 1 - ratio**2 - (2 * order - 1) / x * ratio
    return ratio + slope * (x - x.detach())  # the first term is the value, the second has the gradient


@dataclass(frozen=True)
class Head:
    """Attention with logits scale · ⟨W_q x, W_k y⟩ / √d and values W_v y."""

    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def random(dimension: int, seed: int) -> Head:
        """Matrices with entries of variance 1/d."""
        generator = generator_for(seed, "head")
        return Head(*(torch.randn(dimension, dimension, generator=generator) / dimension**0.5 for _ in range(3)))

    @property
    def bilinear(self) -> Tensor:
        """The matrix A such that the logits at scale 1 are y·Ax."""
        return self.key.double().T @ self.query.double() / len(self.query) ** 0.5

    def horizon(self, law: Law, scale: float) -> float:
        """scale · ‖Lᵀ A L‖, where L Lᵀ is the covariance of tokens: how sharp attention between tokens gets."""
        root = torch.linalg.cholesky(law.covariance() + 1e-6 * torch.eye(law.dimension, dtype=torch.float64))
        return scale * float(torch.linalg.matrix_norm(root.T @ self.bilinear @ root, 2))

    def limit(self, law: Law, scale: float, x: Tensor) -> Tensor:
        """Attention of queries x `[m, d]` over the whole law, in float64."""
        return law.tilted_mean(scale * x.double() @ self.bilinear.T) @ self.value.double().T

    def limit_moments(self, law: Law, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Mean and covariance of `limit` over queries from the law: exact for one Gaussian, else by Monte Carlo."""
        if isinstance(law, Mixture) and len(law.means) == 1:
            centre = law.means.double()
            linear = law.variance * scale * self.value.double() @ self.bilinear
            mean = self.limit(law, scale, centre)[0]
            return mean, law.variance * linear @ linear.T
        out = self.limit(law, scale, law.draw(DRAWS, generator_for(seed, "limit")))
        if isinstance(law, Sphere):  # symmetric, so the mean is exactly 0
            return torch.zeros_like(out[0]), out.T @ out / len(out)
        return out.mean(0), torch.cov(out.T)
