from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.studies.convergence.laws import gaussian, sphere
from bayesattn.studies.convergence.uniform import measure as uniform


def test_the_search_finds_a_larger_error_than_random_queries() -> None:
    law, generator = gaussian(4), torch.Generator().manual_seed(0)
    tokens = law.draw(300, generator).double()
    largest = uniform.largest_error(tokens, law, 3.0, generator)
    x = torch.nn.functional.normalize(torch.randn(20_000, 4, dtype=torch.float64)) * 3
    errors = ((x @ tokens.T).softmax(-1) @ tokens - law.tilted_mean(x)).norm(dim=-1)
    assert largest >= 0.98 * float(errors.max())
    assert largest < 2 * float(errors.max())


def test_the_largest_error_falls_as_one_over_root_n() -> None:
    law, radii, grid = sphere(4), [0.5, 1.0, 2.0], [100, 400, 1600]
    squared = torch.stack(list(uniform.sweep(law, radii, grid, 8)))
    rows = uniform.rows(radii, grid, squared)
    for row in rows:
        assert abs(row.slope + 0.5) < min(0.15, 3 * row.slope_se)
    assert rows[0].constant < rows[-1].constant


@pytest.mark.parametrize(
    ("shape", "constant"),
    [
        ("R^a", lambda r: r**1.5),
        ("exp(aR)", lambda r: math.exp(1.5 * r)),
        ("exp(aR²)", lambda r: math.exp(1.5 * r**2)),
    ],
)
def test_the_shape_of_the_growth_of_the_constant_is_recognised(shape: str, constant: Callable[[float], float]) -> None:
    rows = [uniform.Radius(r, -0.5, 0.01, constant(r), []) for r in (1.0, 2.0, 3.0, 5.0)]
    not_converging = uniform.Radius(8.0, -0.1, 0.01, 1.0, [])
    growth = uniform.growth([*rows, not_converging])
    assert growth is not None
    assert (growth.shape, growth.rate, growth.radii) == (shape, pytest.approx(1.5), 4)
    assert growth.likely == [shape]
    assert uniform.growth(rows[:2]) is None


@pytest.mark.parametrize(
    ("radii", "replicates", "sentence"),
    [
        ([1.0, 2.0], 8, "2 radii are given; at least 3 positive ones are needed"),
        ([1.0, 2.0, -3.0], 8, "3 radii are given; at least 3 positive ones are needed"),
        ([1.0, 2.0, math.inf], 8, "3 radii are given; at least 3 positive ones are needed"),
        ([1.0, 2.0, 3.0], 7, "7 replicates are too few for a fit; at least 8 are needed"),
    ],
)
def test_bad_settings_get_one_sentence(radii: list[float], replicates: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        next(uniform.sweep(gaussian(4), radii, [100, 200, 300], replicates))
