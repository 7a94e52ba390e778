"""What a prior does to convergence: it limits the number of effective tokens, and so how far errors can fall.

Under a prior p over distance the error of one query is C/√n_eff, with n_eff = 1/Σp². The constant C depends on the law
and the query; for Gaussian tokens it is known in closed form (docs/convergence.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bayesattn.errors import UserError
from bayesattn.priors import GeneralizedGaussian, Laplace, Prior, Uniform
from bayesattn.studies.convergence.fits import check_replicates
from bayesattn.studies.convergence.laws import Head, Mixture, generator_for
from bayesattn.studies.convergence.prefixes import prefix_attention
from bayesattn.studies.convergence.prior.run import Floor

QUERIES = 64
SLOPES = (0.3, 0.1, 0.03, 0.01, 0.003)


def families() -> dict[str, Prior]:
    """Priors that limit the effective tokens (ALiBi of several slopes, BAM with beta > 0), and priors that do not."""
    return {
        **{f"ALiBi, slope {slope:g}": Laplace(1, slopes=[slope]) for slope in SLOPES},
        "uniform (NoPE)": Uniform(1),
        "BAM, beta 0.5": GeneralizedGaussian.from_shape([0.5], [8.0]),
        "BAM, beta -0.5": GeneralizedGaussian.from_shape([-0.5], [8.0]),
    }


@torch.no_grad()
def effective_tokens(log_prior: Tensor, lengths: Sequence[int]) -> list[float]:
    """1/Σp² of the prior over the nearest n tokens, for each length n."""
    log_sum, log_sum_squares = log_prior.double().logcumsumexp(-1), (2 * log_prior.double()).logcumsumexp(-1)
    return [float((2 * log_sum[n - 1] - log_sum_squares[n - 1]).exp()) for n in lengths]


def constant(law: Mixture, head: Head, scale: float, x: Tensor) -> Tensor:
    """C of error ≈ C/√n_eff for each query x `[m, d]` and Gaussian tokens.

    C² = E[w² ‖v − Γ‖²] / E[w]² with weights w = exp(b·y).
    """
    if len(law.means) != 1:
        raise UserError(f"the law is a mixture of {len(law.means)} Gaussians; the constant is known for one Gaussian")
    b = scale * x.double() @ head.bilinear.T
    value = head.value.double()
    inner = law.variance * (b**2).sum(-1)
    spread = law.variance * (value**2).sum() + ((law.variance * b @ value.T) ** 2).sum(-1)
    return (inner.exp() * spread).sqrt()


def typical_constant(law: Mixture, head: Head, scale: float) -> float:
    """The root mean square of `constant` over queries from the law, in closed form."""
    a = scale * head.bilinear
    value, variance = head.value.double(), law.variance
    narrowing = torch.eye(law.dimension, dtype=torch.float64) - 2 * variance**2 * a.T @ a
    if not bool((torch.linalg.eigvalsh(narrowing) > 0).all()):
        raise UserError(
            f"at scale {scale:g} the horizon is {head.horizon(law, scale):.2f}; the first-order prediction is finite "
            "only below 0.71, so give a smaller scale"
        )
    shift = variance**2 * (value @ a).T @ (value @ a)
    squared = variance * (value**2).sum() + variance * (shift @ torch.linalg.inv(narrowing)).diagonal().sum()
    return float((squared / torch.linalg.det(narrowing).sqrt()).sqrt())


def sweep(
    law: Mixture,
    priors: Mapping[str, Prior],
    scale: float,
    grid: Sequence[int],
    replicates: int,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """Squared errors `[priors, lengths]`, one replicate at a time from `first` on, of queries after n tokens."""
    check_replicates(replicates)
    head = Head.random(law.dimension, seed)
    tables = _tables(priors, grid[-1])
    for number in range(first, replicates):
        generator = generator_for(seed, "tokens", number)
        # The nearest token comes first, so the first n keys are a context of n tokens.
        tokens = law.draw(grid[-1], generator)
        x = law.draw(QUERIES, generator)
        limit = head.limit(law, scale, x).float()
        q = x @ head.query.T * (scale / law.dimension**0.5)
        outputs = prefix_attention(
            q, tokens @ head.key.T, tokens @ head.value.T, grid, torch.ones(len(priors)), tables.float()
        )
        yield torch.stack([((out - limit) ** 2).sum(-1).mean(-1) for out in outputs], -1)


def rows(
    law: Mixture, priors: Mapping[str, Prior], scale: float, grid: Sequence[int], squared: Tensor, seed: int = 0
) -> list[Floor]:
    """Measured errors and their predictions, from squared errors `[replicates, priors, lengths]`."""
    head = Head.random(law.dimension, seed)
    typical = typical_constant(law, head, scale)
    tables = _tables(priors, grid[-1])
    results = []
    for at, name in enumerate(priors):
        effective = effective_tokens(tables[at], grid)
        tenth, whole = effective_tokens(tables[at], [max(1, grid[-1] // 10), grid[-1]])
        mean = squared[:, at].double().mean(0)
        error = squared[:, at].double().std(0) / math.sqrt(len(squared))
        results.append(
            Floor(
                prior=name,
                floored=(tenth / whole) ** 0.5 > 0.9,
                lengths=list(grid),
                effective=effective,
                measured=mean.sqrt().tolist(),
                measured_se=(error / (2 * mean.sqrt())).tolist(),
                predicted=[typical / math.sqrt(n) for n in effective],
            )
        )
    return results


@torch.no_grad()
def _tables(priors: Mapping[str, Prior], n: int) -> Tensor:
    """Log-priors `[priors, n]` of the first head of each prior; their largest value is 0."""
    tables = torch.stack([prior(torch.arange(n, dtype=torch.float64))[0] for prior in priors.values()])
    return tables - tables.amax(-1, keepdim=True)
