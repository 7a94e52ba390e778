from __future__ import annotations

import math

import pytest
import torch

from bayesattn.convergence import pointwise
from bayesattn.convergence.laws import gaussian, sphere
from bayesattn.errors import UserError


def test_the_search_finds_more_than_chance() -> None:
    law, generator = gaussian(4), torch.Generator().manual_seed(0)
    tokens = law.draw(300, generator).double()
    found = pointwise.largest_error(tokens, law, 3.0, generator)
    x = torch.nn.functional.normalize(torch.randn(20_000, 4, dtype=torch.float64)) * 3
    errors = ((x @ tokens.T).softmax(-1) @ tokens - law.tilted_mean(x)).norm(dim=-1)
    assert found >= 0.98 * float(errors.max())


def test_the_largest_error_falls_as_one_over_root_n() -> None:
    law, radii, grid = sphere(4), [0.5, 1.0, 2.0], [200, 400, 800]
    squared = torch.stack(list(pointwise.uniform(law, radii, grid, 8)))
    rows = pointwise.radius_rows(radii, grid, squared)
    for row in rows:
        assert abs(row.slope + 0.5) < 4 * row.slope_se + 0.05
    assert rows[0].constant < rows[-1].constant


@pytest.mark.parametrize("shape", ["R^a", "exp(aR)", "exp(aR²)"])
def test_the_growth_of_the_constant_is_told(shape: str) -> None:
    grown = {
        "R^a": lambda r: r**1.5,
        "exp(aR)": lambda r: math.exp(1.5 * r),
        "exp(aR²)": lambda r: math.exp(1.5 * r**2),
    }
    rows = [pointwise.Radius(r, -0.5, 0.01, grown[shape](r), []) for r in (1.0, 2.0, 3.0, 5.0)]
    found = pointwise.growth([*rows, pointwise.Radius(8.0, -0.1, 0.01, 1.0, [])])  # whose errors do not fall
    assert found is not None
    assert (found.shape, found.rate, found.radii) == (shape, pytest.approx(1.5), 4)
    assert found.likely == [shape]
    assert pointwise.growth(rows[:2]) is None


def test_rates_as_the_temperature_goes_to_zero() -> None:
    grid, values = [100, 400, 1600, 6400, 25_600], [0.5, math.inf]
    for law, expected in ((sphere(4), -1 / 3), (gaussian(4), None)):
        squared = torch.stack(list(pointwise.hardmax(law, values, grid, 60)))
        soft, hard = pointwise.temperature_rows(values, grid, squared)
        assert abs(soft.power + 0.5) < 4 * soft.power_se + 0.02
        assert soft.preferred == "power"
        if expected is not None:  # on a sphere the nearest of n tokens is n^(−1/(d−1)) away
            assert abs(hard.power - expected) < 0.04
            assert hard.preferred == "power"
        else:
            assert hard.power > -0.15
            assert abs(hard.logarithmic + 0.5) < 0.2
        assert hard.to_dict()["sharpness"] is None


def test_bad_settings_get_one_sentence() -> None:
    with pytest.raises(UserError, match="2 radii are given; at least 3 positive ones are needed"):
        next(pointwise.uniform(gaussian(4), [1.0, 2.0], [100, 200, 300], 8))
    with pytest.raises(UserError, match="sharpness must be positive"):
        next(pointwise.hardmax(gaussian(4), [-1.0], [100, 200, 300], 8))
