from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bayesattn as ba

FAMILIES = {
    "uniform": lambda: ba.Uniform(4),
    "laplace": lambda: ba.Laplace(4),
    "learned laplace": lambda: ba.Laplace(4, learned=True),
    "generalized gaussian": lambda: ba.GeneralizedGaussian(4, "spread", learn=("alpha", "beta", "mu")),
    "window": lambda: ba.Window(4, [1, 2, 30, 1000]),
    "kerple log": lambda: ba.KerpleLog(4),
    "kerple power": lambda: ba.KerplePower(4),
    "t5": lambda: ba.T5Buckets(4),
    "product": lambda: ba.Window(4, 20) * ba.GeneralizedGaussian(4, "spread"),
}


@pytest.fixture(params=FAMILIES)
def prior(request: pytest.FixtureRequest) -> ba.Prior:
    return FAMILIES[request.param]()


def test_a_prior_has_a_row_per_head_for_distances_of_any_shape(prior: ba.Prior) -> None:
    for shape in [(), (1,), (5,), (2, 3)]:
        distance = torch.arange(math.prod(shape)).reshape(shape)
        assert prior(distance).shape == (4, *shape)


def test_a_prior_in_half_precision_computes_in_float32(prior: ba.Prior) -> None:
    assert prior.to(torch.bfloat16)(torch.arange(3)).dtype == torch.float32


def test_float64_distances_give_float64(prior: ba.Prior) -> None:
    assert prior(torch.arange(3.0, dtype=torch.float64)).dtype == torch.float64


def test_every_learned_parameter_gets_a_finite_gradient(prior: ba.Prior) -> None:
    log_p = prior(torch.arange(50)).masked_fill(prior(torch.arange(50)).isneginf(), 0).log_softmax(-1)
    if not list(prior.parameters()):
        return
    log_p[:, 3].sum().backward()
    for name, parameter in prior.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_state_survives_a_round_trip(prior: ba.Prior) -> None:
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(0.1)
    fresh = next(make() for make in FAMILIES.values() if repr(make()) == repr(prior))
    fresh.load_state_dict(prior.state_dict())
    assert torch.equal(fresh(torch.arange(40)), prior(torch.arange(40)))


def test_describe_names_every_head(prior: ba.Prior) -> None:
    summaries = prior.describe(n=64)
    assert [s.head for s in summaries] == [0, 1, 2, 3]
    for summary in summaries:
        assert summary.kind in str(summary)
        assert 0 <= summary.span < 64
        assert 1 - 1e-9 <= summary.effective_tokens <= 64 + 1e-9
        assert summary.parameters.keys() == prior.human_parameters().keys()


@given(
    theta=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=4),
    mass=st.floats(0, 0.99),
    n=st.integers(1, 200),
)
def test_span_leaves_at_most_its_mass_beyond_and_one_less_does_not(
    theta: list[tuple[float, float]], mass: float, n: int
) -> None:
    prior = ba.GeneralizedGaussian(len(theta))
    with torch.no_grad():
        prior.theta_alpha.copy_(torch.tensor([a for a, _ in theta]))
        prior.theta_beta.copy_(torch.tensor([b for _, b in theta]))
    p = prior.log_probability(n).exp()
    for head, span in enumerate(prior.span(mass, n).tolist()):
        assert p[head, span + 1 :].sum() <= mass + 1e-12
        assert span == 0 or p[head, span:].sum() > mass - 1e-12


def test_effective_tokens_of_known_priors() -> None:
    assert torch.allclose(ba.Uniform(2).effective_tokens(100), torch.full((2,), 100.0, dtype=torch.float64))
    assert torch.allclose(ba.Window(1, 7).effective_tokens(100), torch.tensor([7.0], dtype=torch.float64))
    slope = 0.01  # Σp² of a geometric distribution: coth(slope / 2), about 2 / slope
    assert ba.Laplace(1, [slope]).effective_tokens(100_000).item() == pytest.approx(1 / math.tanh(slope / 2), rel=1e-6)


def test_kinds_by_shape() -> None:
    assert ba.Uniform(1).kinds() == ["flat"]
    assert ba.Laplace(2, [0.5, -0.01]).kinds() == ["local", "retrieval"]
    assert ba.Window(2, [5, 10_000]).kinds() == ["local", "flat"]
    t5 = ba.T5Buckets(2)
    with torch.no_grad():
        t5.values[0, 0] = -3.0
        t5.values[1, 0] = -300.0
    assert t5.kinds() == ["retrieval", "aggressive retrieval"]


def test_a_product_adds_logs_and_keeps_both_sets_of_parameters() -> None:
    a, b = ba.Laplace(3), ba.KerpleLog(3)
    d = torch.arange(-10, 10)
    assert torch.equal((a * b)(d), a(d) + b(d))
    assert set((a * b).human_parameters()) == {"slope", "r1", "r2"}
    assert set((a * ba.Laplace(3)).human_parameters()) == {"first slope", "second slope"}
    assert len(list((a * b).parameters())) == 2


def nan_laplace() -> ba.Prior:
    prior = ba.Laplace(1, learned=True)
    nn.init.constant_(prior.slopes, math.nan)  # type: ignore[arg-type]
    return prior


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ba.Laplace(2) * ba.Uniform(3), "Laplace has 2 heads and Uniform has 3"),
        (lambda: ba.Laplace(2) * 3, "unsupported operand"),  # type: ignore[operator]
        (lambda: nan_laplace().span(0.1, 10), "Laplace gives NaN; its parameters must be finite"),
    ],
    ids=["heads", "number", "NaN"],
)
def test_a_mistake_gets_one_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_prior_without_forward_says_so() -> None:
    class Empty(ba.Prior):
        pass

    with pytest.raises(NotImplementedError):
        Empty(1)(Tensor([1.0]))
