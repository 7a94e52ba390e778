"""The certificate: spans leave out at most half of the tolerance, and the queries that break this are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention.cache.spans import Certificate, SpanLimits, Token, norms
from bayesattn.attention.cache.storage import Storage

LIMITS = SpanLimits(least_kept=24, horizon=512)


def certificate(prior: ba.Prior, kv_heads: int | None = None, **settings: Any) -> Certificate:
    arguments = {
        "query_scale": None, "scale_prior": True, "softmax_scale": 0.5, "tolerance": 1e-3, "content_spread": None,
        "limits": LIMITS, "key_norm": torch.zeros(kv_heads or prior.num_heads, dtype=torch.float64), "source": prior,
        **settings,
    }  # fmt: skip
    return Certificate(prior, **arguments)


@given(
    beta=st.sampled_from([0.5, 1.0, 2.0]),
    scale=st.sampled_from([0.5, 1.0, 3.0]),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    tolerance=st.sampled_from([1e-6, 1e-3, 0.1]),
)
def test_the_worst_content_puts_half_the_tolerance_beyond_the_span(
    beta: float, scale: float, spread: float, tolerance: float
) -> None:
    prior = ba.GeneralizedGaussian.from_shape([beta], [scale])
    spans = certificate(prior, content_spread=spread, tolerance=tolerance).plan(100, fewest_visible=1)
    log_prior = prior(torch.arange(512, dtype=torch.float64)).detach()[0]
    if spans[0] is None:
        return
    logits = log_prior + spread  # every key but the likeliest has all the spread in its favour
    logits[0] = log_prior[0]
    assert logits.softmax(-1)[spans[0] :].sum() <= tolerance / 2


@pytest.mark.parametrize(
    ("prior", "tolerance", "spans"),
    [
        (ba.Window(2, [8, 16]), 0.0, [8, 16]),
        (ba.Window(2, [8, 16]), 1e-6, [8, 16]),
        (ba.Window(2, [8, 400]), 0.0, [8, None]),  # longer than half of the horizon
        (ba.Laplace(2, [1.0, 1.0]), 0.0, [None, None]),
        (ba.Uniform(2), 1e-3, [None, None]),
    ],
    ids=["hidden", "hidden with tolerance", "wide", "nothing hidden", "flat"],
)
def test_spans_of_known_priors(prior: ba.Prior, tolerance: float, spans: list[int | None]) -> None:
    assert certificate(prior, content_spread=0.0, tolerance=tolerance).plan(100, 1) == spans


def test_a_key_head_has_the_longest_span_of_its_query_heads() -> None:
    prior = ba.Window(4, [8, 16, 4, 2])
    assert certificate(prior, kv_heads=2, content_spread=0.0).plan(100, 1) == [16, 4]


def test_the_likeliest_key_is_the_nearest_of_those_near_the_peak() -> None:
    prior = ba.GeneralizedGaussian.from_shape([1.0, 2.0, -0.5], [4.0, 3.0, 9.0], [0.0, 20.0, 0.0])
    log_prior = prior(torch.arange(512)).detach()
    near_peak = log_prior >= log_prior.amax(-1, keepdim=True) - 1
    assert certificate(prior).likely.tolist() == near_peak.int().argmax(-1).tolist()


@pytest.mark.parametrize(
    ("length", "content_spread", "largest_spread", "planned", "needed"),
    [
        (23, 3.0, 0.0, None, False),  # too short
        (24, 3.0, 0.0, None, True),
        (24, None, 0.0, None, False),  # nothing is known of the queries
        (24, None, 2.0, None, True),
        (24, None, 2.0, (3.0, 512), False),
        (24, None, 2.5, (3.0, 512), True),  # more than 0.8 of the plan
        (256, None, 2.0, (3.0, 512), False),
        (257, None, 2.0, (3.0, 512), True),  # more than half of the horizon
    ],
)
def test_when_spans_are_planned(
    length: int,
    content_spread: float | None,
    largest_spread: float,
    planned: tuple[float, int] | None,
    needed: bool,
) -> None:
    known = certificate(ba.Laplace(1, [1.0]), content_spread=content_spread)
    known.largest_spread = largest_spread
    if planned is not None:
        known.planned_spread, known.planned_length = planned
    assert known.needs_plan(length) == needed


def test_a_plan_has_a_margin_and_lasts_for_twice_the_length() -> None:
    known = certificate(ba.Laplace(1, [1.0]))
    known.largest_spread = 2.0
    known.plan(700, fewest_visible=700)
    assert known.planned_spread == 3.0
    assert known.planned_length == 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_spread_bounds_how_far_any_key_exceeds_the_likeliest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, q = 3 * torch.randn(2, 1, 2, 40, 16).to(dtype)
    known = certificate(ba.Laplace(2, [1.0, 0.1]), softmax_scale=0.3)
    storage = Storage(same_positions=False)
    storage.start(k, k, 2)
    storage.append(k, k, reserve=0)
    known.add_keys(k)
    known.check_queries(storage.stores, q[:, :, -5:], norms(q[:, :, -5:]), None, 40)
    content = 0.3 * q[:, :, -5:].double() @ k.double().mT
    own = content[..., -5:].diagonal(dim1=-2, dim2=-1)  # the likeliest key is the query's own
    assert (content.amax(-1) - own).max() <= known.largest_spread


@pytest.mark.parametrize("value", [torch.nan, 1e30], ids=str)
def test_queries_of_no_bounded_size_raise_once_keys_are_evicted(value: float) -> None:
    k = torch.randn(1, 1, 60, 4)
    known = certificate(ba.Laplace(1, [1.0]), content_spread=1.0)
    storage = Storage(same_positions=False)
    storage.start(k, k, 1)
    storage.append(k, k, reserve=0)
    known.add_keys(k)
    storage.set_spans(known.plan(60, 1))
    q = torch.full((1, 1, 1, 4), value)
    known.check_queries(storage.stores, q, norms(q), None, 60)  # nothing is evicted yet
    storage.evict(60)
    with pytest.raises(ValueError, match=r"a query at position 59 or after .* which are evicted"):
        known.check_queries(storage.stores, q, norms(q), None, 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e15])
def test_norms_of_a_token_are_no_less_than_they_are(dtype: torch.dtype, size: float) -> None:
    q, k, v = (size * torch.randn(1, heads, 1, 64).to(dtype) for heads in (6, 2, 2))
    token = Token.of(q, k, v)
    assert token is not None
    for x, lengths in ((q, token.queries), (k, token.keys)):
        exact = norms(x).flatten().tolist()
        assert all(length >= true for length, true in zip(lengths, exact, strict=True))
        assert max(lengths) <= 1.001 * max(exact) + 1e-17
    assert token.largest_value >= norms(v).max().item()
    assert Token.of(q, k, v, needs_content=False) == token._replace(content=[])
    content = (q.double() * k.double().repeat_interleave(3, 1)).sum(-1).flatten()
    torch.testing.assert_close(
        torch.tensor(token.content, dtype=torch.float64), content, rtol=1e-3, atol=1e-6 * size**2 + 1e-36
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("which", range(3))
def test_a_token_whose_squares_are_not_finite_is_looked_at_in_another_way(value: float, which: int) -> None:
    tensors = [torch.randn(1, 2, 1, 4) for _ in range(3)]
    tensors[which][0, 1, 0, 2] = value
    assert Token.of(*tensors) is None
