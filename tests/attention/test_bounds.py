"""The bound on content covers every key, in every precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention.bounds import content_bound, likeliest_entry


@given(
    seed=st.integers(0, 2**31),
    softmax_scale=st.sampled_from([-0.3, 0.0, 0.125, 2.0]),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    scaled=st.booleans(),
)
def test_no_content_logit_exceeds_the_bound(seed: int, softmax_scale: float, size: float, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (size * torch.randn(20, 8, generator=generator) for _ in range(2))
    k[:20] = q.where(torch.rand(20, 1, generator=generator) < 0.5, k)  # where Cauchy-Schwarz is an equality
    r = torch.randn(20, generator=generator).double() if scaled else None
    bound = content_bound(q.norm(dim=-1), k.norm(dim=-1).amax(), softmax_scale, r)
    logits = softmax_scale * q.double() @ k.double().T
    logits = logits if r is None else r[:, None] * logits
    assert (logits.abs() <= bound[:, None]).all()


@pytest.mark.parametrize(
    ("log_prior", "away", "entry"),
    [
        ([0.0, -0.5, -3.0], [0, 1, 2], 0),
        ([-3.0, -0.9, 0.0], [0, 1, 2], 1),  # near the peak, and nearer than it
        ([-3.0, -1.1, 0.0], [0, 1, 2], 2),
        ([0.0, -9.0, -0.5], [2, 1, 0], 2),
        ([-torch.inf, -torch.inf, 0.0], [0, 1, 2], 2),
    ],
)
def test_the_likeliest_key_is_the_nearest_near_the_peak(log_prior: list[float], away: list[int], entry: int) -> None:
    assert likeliest_entry(torch.tensor([log_prior]), torch.tensor(away)).tolist() == [entry]


def test_each_head_has_its_own_likeliest_key() -> None:
    prior = ba.GeneralizedGaussian.from_shape([2.0, 2.0], [1.5, 1.5], [3.0, 7.0])
    distance = torch.arange(20)
    log_prior = prior(distance).detach()
    assert likeliest_entry(log_prior - log_prior.amax(-1, keepdim=True), distance).tolist() == [2, 6]
