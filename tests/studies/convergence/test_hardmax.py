from __future__ import annotations

import math

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.studies.convergence.hardmax import measure as hardmax
from bayesattn.studies.convergence.laws import Mixture, Sphere, gaussian, sphere

GRID = [100, 400, 1600, 6400, 25_600]


def soft_and_hard(law: Mixture | Sphere) -> list[hardmax.Temperature]:
    values = [0.5, math.inf]
    return hardmax.rows(values, GRID, torch.stack(list(hardmax.sweep(law, values, GRID, 60))))


@pytest.mark.parametrize("law", [sphere(4), gaussian(4)], ids=["sphere", "gaussian"])
def test_soft_attention_converges_as_one_over_root_n(law: Mixture | Sphere) -> None:
    soft, _ = soft_and_hard(law)
    assert soft.power_se < 0.02
    assert abs(soft.power + 0.5) < 4 * soft.power_se + 0.02
    assert soft.preferred == "power"


def test_hardmax_on_a_sphere_converges_as_a_power() -> None:
    _, hard = soft_and_hard(sphere(4))
    assert abs(hard.power + 1 / 3) < 0.04  # the nearest of n tokens is n^(−1/(d−1)) away
    assert hard.preferred == "power"


def test_hardmax_on_a_gaussian_converges_as_a_power_of_the_logarithm() -> None:
    _, hard = soft_and_hard(gaussian(4))
    assert hard.power > -0.15
    assert abs(hard.logarithmic + 0.5) < 0.2


def test_infinite_sharpness_is_null_in_json() -> None:
    _, hard = soft_and_hard(sphere(4))
    assert hard.to_dict()["sharpness"] is None
    assert hard.name == "hardmax"


@pytest.mark.parametrize(
    ("power_misfit", "logarithmic_misfit", "preferred"),
    [
        (1.0, 20.0, "power"),
        (20.0, 1.0, "logarithmic"),
        (1.0, 6.9, "cannot tell"),
        (300.0, 310.0, "cannot tell"),  # neither law fits, so a difference of 10 says little
    ],
)
def test_a_law_is_preferred_if_its_misfit_is_clearly_smaller(
    power_misfit: float, logarithmic_misfit: float, preferred: str
) -> None:
    row = hardmax.Temperature(1.0, -0.5, 0.01, power_misfit, -1.0, 0.01, logarithmic_misfit, [0.1] * 5)
    assert row.preferred == preferred


@pytest.mark.parametrize(
    ("sharpness", "replicates", "sentence"),
    [
        ([-1.0], 8, "the sharpness is -1; it must be positive"),
        ([1.0, 0.0], 8, "the sharpness is 0; it must be positive"),
        ([1.0], 7, "7 replicates are too few for a fit; at least 8 are needed"),
    ],
)
def test_bad_settings_get_one_sentence(sharpness: list[float], replicates: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        next(hardmax.sweep(gaussian(4), sharpness, [100, 200, 300], replicates))
