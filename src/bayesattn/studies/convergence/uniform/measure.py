"""Uniform convergence: the largest error of attention over a ball of queries, and how it grows with the radius."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from bayesattn.errors import UserError
from bayesattn.studies.convergence.fits import check_replicates, fit, least_squares
from bayesattn.studies.convergence.laws import Law, generator_for
from bayesattn.studies.convergence.uniform.run import Growth, Radius

# The search for the largest error tries many queries, then follows the gradient from the worst of them.
STARTS, CLIMBERS, CLIMBS = 256, 8, 25
# Errors count as falling like 1/√n if their slope is within this of −1/2.
SLOPE_TOLERANCE = 0.1


def largest_error(tokens: Tensor, law: Law, radius: float, generator: Generator) -> float:
    """A close lower bound on sup ‖Γ_n(x) − Γ(x)‖ over ‖x‖ ≤ radius, with logits x·y.

    A search: it starts on spheres of several radii and follows the gradient from the queries with the largest errors.
    """

    def error(x: Tensor) -> Tensor:
        return ((x @ tokens.T).softmax(-1) @ tokens - law.tilted_mean(x).to(x)).norm(dim=-1)

    x = torch.nn.functional.normalize(torch.randn(STARTS, tokens.shape[1], generator=generator, dtype=tokens.dtype))
    x *= radius * torch.linspace(0.25, 1, STARTS, dtype=x.dtype)[:, None]
    # The error is largest where tokens are sparse, so start towards the outermost tokens too.
    outermost = tokens[tokens.norm(dim=-1).topk(min(len(tokens), STARTS // 2)).indices]
    x = torch.cat((x, radius * torch.nn.functional.normalize(outermost)))
    start_errors = error(x)
    largest = float(start_errors.max())
    x = x[start_errors.topk(CLIMBERS).indices]
    step = 0.2 * radius
    for _ in range(CLIMBS):
        x = x.detach().requires_grad_(True)
        (uphill,) = torch.autograd.grad(error(x).sum(), x)
        with torch.no_grad():
            x = x + step * torch.nn.functional.normalize(uphill)
            x = x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1)
            largest = max(largest, float(error(x).max()))
        step *= 0.9
    return largest


def sweep(
    law: Law, radii: Sequence[float], grid: Sequence[int], replicates: int, seed: int = 0, first: int = 0
) -> Iterator[Tensor]:
    """Squared largest errors `[radii, lengths]`, one replicate at a time, from replicate `first` on."""
    check_replicates(replicates)
    if len(radii) < 3 or not all(0 < radius < math.inf for radius in radii):
        raise UserError(f"{len(radii)} radii are given; at least 3 positive ones are needed")
    for number in range(first, replicates):
        generator = generator_for(seed, "tokens", number)
        tokens = law.draw(grid[-1], generator).double()
        yield torch.tensor([[largest_error(tokens[:n], law, r, generator) ** 2 for n in grid] for r in radii])


def rows(radii: Sequence[float], grid: Sequence[int], squared: Tensor) -> list[Radius]:
    """Rates and constants from squared errors `[replicates, radii, lengths]`."""
    x = torch.tensor(grid).double().log()
    results = []
    for at, radius in enumerate(radii):
        line = fit(x, squared[:, at])
        rms = squared[:, at].double().mean(0).sqrt()
        constant = float((rms.log() + x / 2).mean().exp())
        results.append(Radius(radius, line.slope, line.error, constant, rms.tolist()))
    return results


def growth(rows: Sequence[Radius]) -> Growth | None:
    """How the constant grows with the radius: as a power, as an exponential, or as an exponential of the square.

    Uses only the radii whose errors fall as 1/√n. Returns None if there are fewer than three of them.
    """
    rows = [row for row in rows if abs(row.slope + 0.5) < SLOPE_TOLERANCE]
    if len(rows) < 3:
        return None
    y = [math.log(row.constant) for row in rows]
    shapes = {
        "R^a": [math.log(row.radius) for row in rows],
        "exp(aR)": [row.radius for row in rows],
        "exp(aR²)": [row.radius**2 for row in rows],
    }
    fits = {shape: least_squares(x, y) for shape, x in shapes.items()}
    best = min(fits, key=lambda shape: fits[shape][1])
    return Growth(best, fits[best][0], {shape: line[1] for shape, line in fits.items()}, len(rows))
