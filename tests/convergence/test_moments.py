from __future__ import annotations

import pytest
import torch

from bayesattn.convergence import moments
from bayesattn.convergence.laws import LAWS, gaussian
from bayesattn.errors import UserError


def test_with_all_tokens_asking_it_is_dense_attention() -> None:
    law, scales, grid = gaussian(6), [0.5, 5.0, 40.0], [64, 100, 180]
    fast = next(moments.sweep(law, scales, grid, 8, share=1))
    assert torch.allclose(fast, moments.dense(law, scales, grid), rtol=1e-3)


def test_fewer_questions_give_the_same_squared_errors_on_average() -> None:
    """What a part of the queries adds to squared errors is taken off without bias, for fixed tokens."""
    law = gaussian(5)
    out = torch.randn(400, 5, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.arange(1.0, 6.0))
    mean, covariance = torch.full((5,), 0.3), torch.eye(5)
    whole = torch.stack(moments.squared_errors(out, 400, mean, covariance))
    parts = []
    for seed in range(3000):
        chosen = torch.randperm(400, generator=torch.Generator().manual_seed(seed))[:50]
        parts.append(torch.stack(moments.squared_errors(out[chosen], 400, mean, covariance)))
    found = torch.stack(parts)
    assert ((found.mean(0) - whole).abs() < 4 * found.std(0) / 3000**0.5 + 0.01 * whole).all()
    assert law.dimension == 5


def test_slopes_are_minus_one_half_where_attention_is_soft_and_shallower_where_it_is_sharp() -> None:
    law, scales, grid = gaussian(20), [0.5, 60.0], [100, 200, 400, 800]
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
    ("settings", "message"),
    [
        ({"replicates": 3}, "3 replicates are too few for a fit"),
        ({"share": 20}, "one in 20 tokens asks; 1 to 8 is allowed with 64 tokens or more"),
        ({"scales": [0.0]}, "scales must be positive and finite"),
    ],
)
def test_bad_settings_get_one_sentence(settings: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"scales": [1.0], "replicates": 8, "share": 1, **settings}
    with pytest.raises(UserError, match=message):
        next(moments.sweep(gaussian(4), given.pop("scales"), [64, 100, 200], given.pop("replicates"), **given))  # type: ignore[arg-type]
