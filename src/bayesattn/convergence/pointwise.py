"""The largest error of attention over a ball of queries, and what becomes of rates as the temperature goes to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from bayesattn.convergence.fits import Line, check_replicates, fit, straight
from bayesattn.convergence.laws import Law, Mixture, Sphere, numbers
from bayesattn.errors import UserError

# The search for the largest error: many places, then uphill from the worst of them.
STARTS, CLIMBERS, CLIMBS = 256, 8, 25
# A slope this near to −1/2 is taken for it.
NEARLY_HALF = 0.1
# Misfit by which a rate must win to be preferred; 6 is odds of e³ to 1 for errors that are Gaussian.
PREFERRED = 6.0


def largest_error(tokens: Tensor, law: Law, radius: float, generator: Generator) -> float:
    """sup ‖Γ_n(x) − Γ(x)‖ over ‖x‖ ≤ radius with logits x·y, by search: a lower bound that is close.

    The search starts on spheres of several radii and follows the gradient from the worst places.
    """

    def error(x: Tensor) -> Tensor:
        return ((x @ tokens.T).softmax(-1) @ tokens - law.tilted_mean(x).to(x)).norm(dim=-1)

    x = torch.nn.functional.normalize(torch.randn(STARTS, tokens.shape[1], generator=generator, dtype=tokens.dtype))
    x *= radius * torch.linspace(0.25, 1, STARTS, dtype=x.dtype)[:, None]
    # Where tokens are sparse the error is largest: towards the outermost of them, too.
    outermost = tokens[tokens.norm(dim=-1).topk(min(len(tokens), STARTS // 2)).indices]
    x = torch.cat((x, radius * torch.nn.functional.normalize(outermost)))
    found = error(x)
    best = float(found.max())
    x = x[found.topk(CLIMBERS).indices]
    step = 0.2 * radius
    for _ in range(CLIMBS):
        x = x.detach().requires_grad_(True)
        (uphill,) = torch.autograd.grad(error(x).sum(), x)
        with torch.no_grad():
            x = x + step * torch.nn.functional.normalize(uphill)
            x = x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1)
            best = max(best, float(error(x).max()))
        step *= 0.9
    return best


@dataclass(frozen=True)
class Radius:
    """One radius: the rate in n, and C with error = C / √n."""

    radius: float
    slope: float
    slope_se: float
    constant: float
    errors: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Growth:
    """How the constant grows: the shape that leaves least unexplained, its a, and on how many radii it is seen."""

    shape: str
    rate: float
    unexplained: dict[str, float]
    radii: int

    @property
    def likely(self) -> list[str]:
        """The shape that leaves least unexplained, and those that leave less than twice that."""
        ordered = sorted(self.unexplained, key=lambda shape: self.unexplained[shape])
        return [shape for shape in ordered if self.unexplained[shape] < 2 * self.unexplained[ordered[0]] + 1e-12]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def uniform(law: Law, radii: Sequence[float], grid: Sequence[int], replicates: int, seed: int = 0) -> Iterator[Tensor]:
    """Squared largest errors `[radii, lengths]` of each replicate in turn."""
    check_replicates(replicates)
    if len(radii) < 3 or not all(0 < radius < math.inf for radius in radii):
        raise UserError(f"{len(radii)} radii are given; at least 3 positive ones are needed")
    for number in range(replicates):
        generator = numbers(seed, "tokens", number)
        tokens = law.draw(grid[-1], generator).double()
        yield torch.tensor([[largest_error(tokens[:n], law, r, generator) ** 2 for n in grid] for r in radii])


def radius_rows(radii: Sequence[float], grid: Sequence[int], squared: Tensor) -> list[Radius]:
    """Rates and constants from squared errors `[replicates, radii, lengths]`."""
    x = torch.tensor(grid).double().log()
    rows = []
    for at, radius in enumerate(radii):
        line = fit(x, squared[:, at])
        rms = squared[:, at].double().mean(0).sqrt()
        constant = float((rms.log() + x / 2).mean().exp())
        rows.append(Radius(radius, line.slope, line.error, constant, rms.tolist()))
    return rows


def growth(rows: Sequence[Radius]) -> Growth | None:
    """Of the constant with the radius: as a power, exponentially, or as the exponential of the square.

    Only radii count whose errors fall as 1/√n already; None if these are fewer than three.
    """
    rows = [row for row in rows if abs(row.slope + 0.5) < NEARLY_HALF]
    if len(rows) < 3:
        return None
    y = [math.log(row.constant) for row in rows]
    shapes = {
        "R^a": [math.log(row.radius) for row in rows],
        "exp(aR)": [row.radius for row in rows],
        "exp(aR²)": [row.radius**2 for row in rows],
    }
    fits = {shape: straight(x, y) for shape, x in shapes.items()}
    best = min(fits, key=lambda shape: fits[shape][1])
    return Growth(best, fits[best][0], {shape: line[1] for shape, line in fits.items()}, len(rows))


@dataclass(frozen=True)
class Temperature:
    """One sharpness of attention: the n^a and the (log n)^b that fit best, and which of them the data prefer.

    `sharpness` is the standard deviation of the logits; infinite for hardmax.
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
        # Where neither fits, residuals are larger than chance makes them, and so must be the difference.
        larger = max(1.0, min(self.logarithmic_misfit, self.power_misfit) / max(1, len(self.errors) - 2))
        difference = (self.logarithmic_misfit - self.power_misfit) / larger
        return "cannot tell" if abs(difference) < PREFERRED else "power" if difference > 0 else "logarithmic"

    def to_dict(self) -> dict[str, Any]:
        sharpness = None if math.isinf(self.sharpness) else self.sharpness
        return {**asdict(self), "sharpness": sharpness, "preferred": self.preferred}


def relative_error(tokens: Tensor, law: Mixture | Sphere, sharpness: Sequence[float]) -> Tensor:
    """Squared error of attention of one query, relative to its limit, at each sharpness `[S]`.

    The query is any: the law looks the same from everywhere. At infinite sharpness the limit is the outermost point in
    the query's direction. A Gaussian has none; there it is √(2 log n) standard deviations out, as the outermost of n
    tokens is.
    """
    deviation = float(law.covariance()[0, 0]) ** 0.5
    errors = []
    for s in sharpness:
        if math.isinf(s):
            found = tokens[tokens[:, 0].argmax()]
            reach = law.radius if isinstance(law, Sphere) else deviation * math.sqrt(2 * math.log(len(tokens)))
        else:
            found = (tokens[:, 0] * (s / deviation)).softmax(0) @ tokens
            b = torch.zeros(1, law.dimension, dtype=tokens.dtype)
            b[0, 0] = s / deviation
            reach = float(law.tilted_mean(b)[0, 0])
        target = torch.zeros_like(found)
        target[0] = reach
        errors.append(((found - target) ** 2).sum() / reach**2)
    return torch.stack(errors)


def hardmax(
    law: Mixture | Sphere, sharpness: Sequence[float], grid: Sequence[int], replicates: int, seed: int = 0
) -> Iterator[Tensor]:
    """Squared relative errors `[sharpness, lengths]` of each replicate in turn; every length has its own draw."""
    check_replicates(replicates)
    if not all(s > 0 for s in sharpness):
        raise UserError("sharpness must be positive")
    for number in range(replicates):
        generator = numbers(seed, "tokens", number)
        yield torch.stack([relative_error(law.draw(n, generator), law, sharpness) for n in grid], -1)


def temperature_rows(sharpness: Sequence[float], grid: Sequence[int], squared: Tensor) -> list[Temperature]:
    """Both rates at each sharpness from squared errors `[replicates, sharpness, lengths]`."""
    log_n = torch.tensor(grid).double().log()
    rows = []
    for at, s in enumerate(sharpness):
        power: Line = fit(log_n, squared[:, at])
        logarithmic: Line = fit(log_n.log(), squared[:, at])
        rows.append(
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
    return rows
