"""What each family is, one claim at a time."""

from __future__ import annotations

import pytest
import torch

import bayesattn as ba

D = torch.arange(-40, 41)


def test_uniform_is_zero_everywhere() -> None:
    assert not ba.Uniform(3)(D).any()


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(ba.alibi_slopes(heads), theirs)


def test_laplace_falls_linearly_on_both_sides() -> None:
    assert torch.equal(ba.Laplace(2, [0.5, 0.25])(D), -torch.tensor([[0.5], [0.25]]) * D.abs())


def test_only_learned_slopes_are_parameters() -> None:
    assert not list(ba.Laplace(4).parameters())
    assert [name for name, _ in ba.Laplace(4, learned=True).named_parameters()] == ["slopes"]
    assert ba.Laplace(4).state_dict().keys() == ba.Laplace(4, learned=True).state_dict().keys()


def test_generalized_gaussian_is_its_formula() -> None:
    prior = ba.GeneralizedGaussian(3, learn=("alpha", "beta", "mu"))
    alpha, beta, mu = torch.randn(3, 1), torch.tensor([[2.0], [0.5], [-0.7]]), torch.randn(3, 1)
    with torch.no_grad():
        prior.theta_alpha.copy_(alpha[:, 0])
        prior.theta_beta.copy_(beta[:, 0])
        prior.theta_mu.copy_(mu[:, 0])
    key_minus_query = -D
    expected = -alpha.exp() * ((key_minus_query - (mu.exp() - (-mu).exp())).abs() + 1e-5) ** beta
    torch.testing.assert_close(prior(D), expected, rtol=1e-4, atol=1e-5)


def test_generalized_gaussian_with_beta_one_is_laplace() -> None:
    torch.testing.assert_close(ba.GeneralizedGaussian(8, "alibi")(D), ba.Laplace(8)(D), rtol=1e-5, atol=1e-4)


def test_generalized_gaussian_starts_flat_by_default() -> None:
    assert ba.GeneralizedGaussian(5).kinds() == ["flat"] * 5


def test_spread_has_heads_of_every_kind() -> None:
    kinds = ba.GeneralizedGaussian(5, "spread").kinds()
    assert kinds == ["local", "local", "flat", "retrieval", "aggressive retrieval"]


def test_linear_and_sampled_start_as_the_authors_code_does() -> None:
    linear = ba.GeneralizedGaussian(5, "linear")
    assert linear.theta_beta.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert not linear.theta_alpha.any()
    torch.manual_seed(0)
    sampled = ba.GeneralizedGaussian(4000, "sampled")
    for normal in (sampled.theta_beta, sampled.theta_alpha.log()):
        assert normal.mean().abs() < 0.08  # five standard errors
        assert abs(normal.std() - 1) < 0.06
    assert not sampled.theta_mu.any()


def test_negative_beta_suppresses_the_near_and_frees_the_far() -> None:
    (log_p,) = ba.GeneralizedGaussian.from_shape([-1.0], [1.0])(torch.tensor([0, 1, 10, 1000]))
    torch.testing.assert_close(log_p, torch.tensor([-1e5, -1.0, -0.1, -0.001]), rtol=1e-3, atol=1e-6)


def test_from_shape_and_human_parameters_are_inverse() -> None:
    shape = {"beta": [1.0, 0.5, -0.5], "scale": [10.0, 3.0, 7.0], "centre": [0.0, 5.0, -2.0]}
    values = ba.GeneralizedGaussian.from_shape(**shape).human_parameters()
    for name, expected in shape.items():
        torch.testing.assert_close(values[name].float(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_centre_is_in_tokens_back() -> None:
    (log_p,) = ba.GeneralizedGaussian.from_shape([1.0], [2.0], centre=[5.0])(torch.arange(20))
    assert log_p.argmax() == 5


def test_extreme_parameters_give_finite_values_and_gradients() -> None:
    prior = ba.GeneralizedGaussian(4, learn=("alpha", "beta", "mu"))
    with torch.no_grad():
        prior.theta_beta.copy_(torch.tensor([-30.0, -8.0, 8.0, 30.0]))
    log_p = prior(torch.arange(1000))
    assert log_p.isfinite().all()
    log_p.log_softmax(-1)[:, 5].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in prior.parameters())


def test_what_is_not_learned_is_no_parameter() -> None:
    prior = ba.GeneralizedGaussian(2, learn=("beta",))
    assert [name for name, _ in prior.named_parameters()] == ["theta_beta"]
    assert set(prior.state_dict()) == {"theta_alpha", "theta_beta", "theta_mu"}


def test_window_sees_itself_and_the_keys_before() -> None:
    log_p = ba.Window(2, [1, 3])(torch.arange(-4, 5))
    assert log_p[0].isfinite().nonzero().flatten().tolist() == [4]
    assert log_p[1].isfinite().nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


def test_kerple_forms_are_their_formulas() -> None:
    log_form, power_form = ba.KerpleLog(3), ba.KerplePower(3)
    with torch.no_grad():
        log_form.log_r2.add_(0.3)
        power_form.logit_r2.sub_(0.5)
    r1, r2 = (x[:, None] for x in log_form.human_parameters().values())
    torch.testing.assert_close(log_form(D), -r1 * (1 + r2 * D.abs()).log())
    r1, r2 = (x[:, None] for x in power_form.human_parameters().values())
    torch.testing.assert_close(power_form(D), -r1 * D.abs() ** r2)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (16, 500)])
def test_t5_buckets_are_those_of_transformers(bidirectional: bool, buckets: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-700, 701)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional, buckets, farthest)
    assert torch.equal(ba.T5Buckets(1, buckets, farthest, bidirectional).bucket(distance), theirs)


def test_t5_reports_the_farthest_bucket_back() -> None:
    for bidirectional in (False, True):
        prior = ba.T5Buckets(1, bidirectional=bidirectional)
        with torch.no_grad():
            prior.values.copy_(torch.arange(32.0))
        assert prior.human_parameters()["farthest"] == prior(torch.tensor(10_000))
