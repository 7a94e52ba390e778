"""What a prior does to convergence: it caps the number of tokens that count, and with it how far errors can fall.

Under a prior p over distance the error of one query falls as 1/√n_eff with n_eff = 1/Σp², times a constant that the law
and the query decide and that is known in closed form for Gaussian tokens (docs/convergence.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.convergence.fits import check_replicates
from bayesattn.convergence.laws import Head, Mixture, numbers
from bayesattn.convergence.prefixes import prefix_attention
from bayesattn.errors import UserError
from bayesattn.priors import GeneralizedGaussian, Laplace, Prior, Uniform

QUERIES = 64
SLOPES = (0.3, 0.1, 0.03, 0.01, 0.003)


@dataclass(frozen=True)
class Row:
    """One prior: errors measured and predicted at each length, and effective tokens.

    `floored`: the error has stopped falling, the last nine tenths of the tokens lower it by less than a tenth.
    """

    prior: str
    floored: bool
    lengths: list[int]
    effective: list[float]
    measured: list[float]
    measured_se: list[float]
    predicted: list[float]

    @property
    def ratio(self) -> float:
        """Measured over predicted at the longest length."""
        return self.measured[-1] / self.predicted[-1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def families() -> dict[str, Prior]:
    """Priors that cap effective tokens, ALiBi's of several slopes and BAM's with beta > 0, and some that do not."""
    return {
        **{f"ALiBi, slope {slope:g}": Laplace(1, slopes=[slope]) for slope in SLOPES},
        "uniform (NoPE)": Uniform(1),
        "BAM, beta 0.5": GeneralizedGaussian.from_shape([0.5], [8.0]),
        "BAM, beta -0.5": GeneralizedGaussian.from_shape([-0.5], [8.0]),
    }


@torch.no_grad()
def effective_tokens(log_prior: Tensor, lengths: Sequence[int]) -> list[float]:
    """1/Σp² of the prior over the nearest n tokens, for each n."""
    once, twice = log_prior.double().logcumsumexp(-1), (2 * log_prior.double()).logcumsumexp(-1)
    return [float((2 * once[n - 1] - twice[n - 1]).exp()) for n in lengths]


def constant(law: Mixture, head: Head, scale: float, x: Tensor) -> Tensor:
    """C with error ≈ C/√n_eff for each query, Gaussian tokens: E[w² ‖v − Γ‖²] / E[w]² with w = exp(b·y), rooted."""
    if len(law.means) != 1:
        raise UserError("the constant is known for one Gaussian, not for a mixture")
    b = scale * x.double() @ head.bilinear.T
    value = head.value.double()
    inner = law.variance * (b**2).sum(-1)
    spread = law.variance * (value**2).sum() + ((law.variance * b @ value.T) ** 2).sum(-1)
    return (inner.exp() * spread).sqrt()


def typical_constant(law: Mixture, head: Head, scale: float) -> float:
    """The root mean square of `constant` over queries of the law, in closed form too."""
    a = scale * head.bilinear
    value, size = head.value.double(), law.variance
    narrowing = torch.eye(law.dimension, dtype=torch.float64) - 2 * size**2 * a.T @ a
    if not bool((torch.linalg.eigvalsh(narrowing) > 0).all()):
        raise UserError(
            f"at scale {scale:g} the horizon is {head.horizon(law, scale):.2f}; from 0.71 on the mean error of a "
            "first-order prediction is infinite, give a smaller scale"
        )
    moved = size**2 * (value @ a).T @ (value @ a)
    squared = size * (value**2).sum() + size * (moved @ torch.linalg.inv(narrowing)).diagonal().sum()
    return float((squared / torch.linalg.det(narrowing).sqrt()).sqrt())


def measure(
    law: Mixture, priors: Mapping[str, Prior], scale: float, grid: Sequence[int], replicates: int, seed: int = 0
) -> Iterator[Tensor]:
    """Squared errors `[priors, lengths]` of each replicate in turn: queries behind the last of n tokens."""
    check_replicates(replicates)
    head = Head.random(law.dimension, seed)
    tables = _tables(priors, grid[-1])
    for number in range(replicates):
        generator = numbers(seed, "tokens", number)
        # The nearest token first: the first n keys are those that a context of n has.
        tokens = law.draw(grid[-1], generator)
        x = law.draw(QUERIES, generator)
        truth = head.limit(law, scale, x).float()
        q = x @ head.query.T * (scale / law.dimension**0.5)
        out = prefix_attention(
            q, tokens @ head.key.T, tokens @ head.value.T, grid, torch.ones(len(priors)), tables.float()
        )
        yield torch.stack([((found - truth) ** 2).sum(-1).mean(-1) for found in out], -1)


def rows(
    law: Mixture, priors: Mapping[str, Prior], scale: float, grid: Sequence[int], squared: Tensor, seed: int = 0
) -> list[Row]:
    """Errors next to their prediction, from squared errors `[replicates, priors, lengths]`."""
    head = Head.random(law.dimension, seed)
    typical = typical_constant(law, head, scale)
    tables = _tables(priors, grid[-1])
    found = []
    for at, name in enumerate(priors):
        effective = effective_tokens(tables[at], grid)
        tenth, whole = effective_tokens(tables[at], [max(1, grid[-1] // 10), grid[-1]])
        mean = squared[:, at].double().mean(0)
        error = squared[:, at].double().std(0) / math.sqrt(len(squared))
        found.append(
            Row(
                prior=name,
                floored=(tenth / whole) ** 0.5 > 0.9,
                lengths=list(grid),
                effective=effective,
                measured=mean.sqrt().tolist(),
                measured_se=(error / (2 * mean.sqrt())).tolist(),
                predicted=[typical / math.sqrt(n) for n in effective],
            )
        )
    return found


@torch.no_grad()
def _tables(priors: Mapping[str, Prior], n: int) -> Tensor:
    """Log-priors `[priors, n]` of the first head of each, largest value 0."""
    tables = torch.stack([prior(torch.arange(n, dtype=torch.float64))[0] for prior in priors.values()])
    return tables - tables.amax(-1, keepdim=True)
