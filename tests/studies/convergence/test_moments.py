from __future__ import annotations

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.studies.convergence.laws import LAWS, Head, gaussian
from bayesattn.studies.convergence.moments import measure as moments


def test_with_all_tokens_as_queries_it_is_dense_attention() -> None:
    law, scales, grid = gaussian(6), [0.5, 5.0, 40.0], [64, 100, 180]
    head = Head.random(6, 0)
    limits = [head.limit_moments(law, scale) for scale in scales]
    tokens = law.draw(180, torch.Generator().manual_seed(1))
    fast = moments.replicate(tokens, head, scales, grid, limits, share=1)
    assert torch.allclose(fast, moments.dense(tokens, head, scales, grid, limits), rtol=1e-3)


@pytest.mark.parametrize("dimension", [3, 50])
@pytest.mark.parametrize("queries", [8, 32])
def test_fewer_queries_give_the_same_squared_errors_on_average(dimension: int, queries: int) -> None:
    """The noise of a subset of the queries is subtracted without bias, even where it is most of the error."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(4000, 256, dimension, generator=generator) * torch.linspace(0.5, 2, dimension)
    out *= torch.rand(4000, 256, 1, generator=generator) + 0.5  # heavier tails than a Gaussian's
    mean = torch.zeros(dimension)
    covariance = torch.diag(torch.linspace(0.5, 2, dimension) ** 2) * (13 / 12)
    whole = torch.stack(moments.squared_errors(out, 256, mean, covariance))
    parts = torch.stack(moments.squared_errors(out[:, :queries], 256, mean, covariance))
    difference = parts - whole
    standard_error = difference.std(1) / 4000**0.5
    assert (difference.mean(1).abs() < 4 * standard_error).all()
    # Without the correction the mean would have this much more, which the test would see.
    assert (1 / queries - 1 / 256) * float(torch.trace(covariance)) > 20 * standard_error[0]


def test_slopes_are_minus_one_half_where_attention_is_soft_and_shallower_where_it_is_sharp() -> None:
    law, scales, grid = gaussian(20), [0.5, 60.0], [128, 256, 512, 1024]
    errors = torch.stack(list(moments.sweep(law, scales, grid, 60, share=4)))
    soft, sharp = moments.rows(law, scales, grid, errors)
    assert abs(soft.slope_mean + 0.5) < 3 * soft.slope_mean_se + 0.02
    assert abs(soft.slope_cov + 0.5) < 3 * soft.slope_cov_se + 0.05
    assert sharp.slope_mean > soft.slope_mean + 3 * sharp.slope_mean_se
    assert sharp.horizon > soft.horizon
    assert set(soft.to_dict()) >= {"horizon", "slope_mean", "slope_mean_se", "slope_cov", "slope_cov_se"}


@pytest.mark.parametrize("name", list(LAWS))
def test_the_closed_form_is_the_limit_of_a_million_tokens(name: str) -> None:
    assert 0.8 < moments.check_limit(LAWS[name](), 5.0, queries=16) < 1.25


def test_runs_are_repeatable() -> None:
    law = gaussian(4)
    first, second = (next(moments.sweep(law, [1.0], [64, 80, 100], 8, share=2, seed=3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, next(moments.sweep(law, [1.0], [64, 80, 100], 8, share=2, seed=4)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replicates": 3}, "3 replicates are too few for a fit"),
        ({"share": 20}, "one in 20 of 64 tokens gives 3 queries; at least 32 are needed"),
        ({"scales": [0.0]}, "the scale is 0; it must be positive and finite"),
    ],
)
def test_bad_settings_get_one_sentence(settings: dict[str, object], sentence: str) -> None:
    given: dict[str, object] = {"scales": [1.0], "replicates": 8, "share": 1, **settings}
    with pytest.raises(UserError, match=sentence):
        next(moments.sweep(gaussian(4), given.pop("scales"), [64, 100, 200], given.pop("replicates"), **given))  # type: ignore[arg-type]
