from __future__ import annotations

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.priors import GeneralizedGaussian, Laplace, Uniform
from bayesattn.studies.convergence.laws import Head, gaussian, mixture
from bayesattn.studies.convergence.prior import measure as study


def test_effective_tokens_are_the_priors() -> None:
    for prior in (Uniform(1), Laplace(1, slopes=[0.05]), GeneralizedGaussian.from_shape([-0.5], [8.0])):
        table = prior(torch.arange(500, dtype=torch.float64))[0]
        effective = study.effective_tokens(table, [1, 20, 500])
        assert effective == pytest.approx([float(prior.effective_tokens(n)[0]) for n in (1, 20, 500)])


def test_the_constant_is_what_importance_weights_cost() -> None:
    law, head = gaussian(6), Head.random(6, 0)
    x = law.draw(3, torch.Generator().manual_seed(1))
    y = law.draw(2_000_000, torch.Generator().manual_seed(2)).double()
    w = (4.0 * x.double() @ head.bilinear.T @ y.T).exp()
    values = y @ head.value.double().T
    limit = head.limit(law, 4.0, x)
    for row in range(3):
        measured = ((w[row] ** 2) * ((values - limit[row]) ** 2).sum(-1)).mean() / w[row].mean() ** 2
        assert study.constant(law, head, 4.0, x)[row] == pytest.approx(float(measured) ** 0.5, rel=0.02)


def test_the_constant_of_a_mixture_is_refused() -> None:
    law = mixture(6)
    x = law.draw(3, torch.Generator().manual_seed(1))
    with pytest.raises(UserError, match="the law is a mixture of 4 Gaussians; the constant is known for one Gaussian"):
        study.constant(law, Head.random(6, 0), 4.0, x)


def test_floors_are_where_effective_tokens_put_them() -> None:
    law, priors, grid = gaussian(20), study.families(), [10, 100, 1000, 3000]
    squared = torch.stack(list(study.sweep(law, priors, 5.0, grid, 40)))
    rows = {row.prior: row for row in study.rows(law, priors, 5.0, grid, squared)}
    assert len(rows) == len(priors)
    for row in rows.values():
        assert 0.85 < row.ratio < 1.15
    assert rows["ALiBi, slope 0.1"].floored
    assert not rows["BAM, beta -0.5"].floored
    assert not rows["uniform (NoPE)"].floored


def test_the_typical_constant_is_the_mean_over_queries() -> None:
    law, head = gaussian(), Head.random(50, 0)
    x = law.draw(50_000, torch.Generator().manual_seed(1))
    sampled = float((study.constant(law, head, 5.0, x) ** 2).mean() ** 0.5)
    assert study.typical_constant(law, head, 5.0) == pytest.approx(sampled, rel=0.01)


def test_a_scale_without_a_prediction_is_refused() -> None:
    with pytest.raises(UserError, match=r"at scale 30 the horizon is 1.01; the first-order prediction is finite only"):
        study.typical_constant(gaussian(), Head.random(50, 0), 30.0)
