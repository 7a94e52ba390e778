"""Convergence as the temperature goes to zero: does the error fall as a power of n, or of its logarithm?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayesattn.errors import UserError
from bayesattn.studies.convergence.fits import check_replicates, fit
from bayesattn.studies.convergence.hardmax.run import Temperature
from bayesattn.studies.convergence.laws import Mixture, Sphere, generator_for


def relative_error(tokens: Tensor, law: Mixture | Sphere, sharpness: Sequence[float]) -> Tensor:
    """Squared error of attention of one query, relative to its limit, at each sharpness `[S]`.

    The law is isotropic, so all queries have the same error. At infinite sharpness the limit is the outermost point of
    the law in the query's direction. A Gaussian has no such point; we take √(2 log n) standard deviations, where the
    outermost of n tokens lies.
    """
    deviation = float(law.covariance()[0, 0]) ** 0.5
    errors = []
    for s in sharpness:
        if math.isinf(s):
            output = tokens[tokens[:, 0].argmax()]
            reach = law.radius if isinstance(law, Sphere) else deviation * math.sqrt(2 * math.log(len(tokens)))
        else:
            output = (tokens[:, 0] * (s / deviation)).softmax(0) @ tokens
            b = torch.zeros(1, law.dimension, dtype=tokens.dtype)
            b[0, 0] = s / deviation
            reach = float(law.tilted_mean(b)[0, 0])
        target = torch.zeros_like(output)
        target[0] = reach
        errors.append(((output - target) ** 2).sum() / reach**2)
    return torch.stack(errors)


def sweep(
    law: Mixture | Sphere,
    sharpness: Sequence[float],
    grid: Sequence[int],
    replicates: int,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """Squared relative errors `[sharpness, lengths]`, one replicate at a time from `first` on.

    Each length has its own draw.
    """
    check_replicates(replicates)
    for s in sharpness:
        if not s > 0:
            raise UserError(f"the sharpness is {s:g}; it must be positive")
    for number in range(first, replicates):
        generator = generator_for(seed, "tokens", number)
        yield torch.stack([relative_error(law.draw(n, generator), law, sharpness) for n in grid], -1)


def rows(sharpness: Sequence[float], grid: Sequence[int], squared: Tensor) -> list[Temperature]:
    """Both fits at each sharpness, from squared errors `[replicates, sharpness, lengths]`."""
    log_n = torch.tensor(grid).double().log()
    results = []
    for at, s in enumerate(sharpness):
        power = fit(log_n, squared[:, at])
        logarithmic = fit(log_n.log(), squared[:, at])
        results.append(
            Temperature(
                sharpness=None if math.isinf(s) else s,
                power=power.slope,
                power_se=power.error,
                power_misfit=power.misfit,
                logarithmic=logarithmic.slope,
                logarithmic_se=logarithmic.error,
                logarithmic_misfit=logarithmic.misfit,
                errors=squared[:, at].double().mean(0).sqrt().tolist(),
            )
        )
    return results
