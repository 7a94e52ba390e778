"""Convergence as the temperature goes to zero: does the error fall as a power of n, or of its logarithm?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesattn.convergence.fits import check_replicates, fit
from bayesattn.convergence.laws import Mixture, Sphere, generator_for
from bayesattn.errors import UserError

# The better law must lower the misfit by this much. For Gaussian errors, 6 means odds of e³ to 1.
LEAST_DIFFERENCE = 6.0


@dataclass(frozen=True)
class Temperature:
    """One sharpness of attention: the best fits n^a and (log n)^b to the error, and which of the two fits better.

    `sharpness` is the standard deviation of the logits; infinite for hardmax. `power` is a, `logarithmic` is b.
    """

    sharpness: float
    power: float
    power_se: float
    power_misfit: float
    logarithmic: float
    logarithmic_se: float
    logarithmic_misfit: float
    errors: list[float]

    @property
    def preferred(self) -> str:
        # If neither law fits, the residuals exceed the noise, so the difference has to be larger too.
        excess = max(1.0, min(self.logarithmic_misfit, self.power_misfit) / max(1, len(self.errors) - 2))
        difference = (self.logarithmic_misfit - self.power_misfit) / excess
        return "cannot tell" if abs(difference) < LEAST_DIFFERENCE else "power" if difference > 0 else "logarithmic"

    def to_dict(self) -> dict[str, Any]:
        sharpness = None if math.isinf(self.sharpness) else self.sharpness
        return {**asdict(self), "sharpness": sharpness, "preferred": self.preferred}


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
    law: Mixture | Sphere, sharpness: Sequence[float], grid: Sequence[int], replicates: int, seed: int = 0
) -> Iterator[Tensor]:
    """Squared relative errors `[sharpness, lengths]`, one replicate at a time; each length has its own draw."""
    check_replicates(replicates)
    for s in sharpness:
        if not s > 0:
            raise UserError(f"the sharpness is {s:g}; it must be positive")
    for number in range(replicates):
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
                sharpness=s,
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
