from __future__ import annotations

import pytest
import torch

import bayesattn as ba
from bayesattn.fit.ladder import attention_shape, make_ladder, outputs_by_width


@pytest.mark.parametrize("length", [1, 2, 33, 65])
@pytest.mark.parametrize("sinks", [1, 4])
def test_each_rung_is_attention_with_a_window_and_sinks(length: int, sinks: int) -> None:
    q, k, v = torch.randn(1, 3, length, 8), torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 5)
    rows, widths = torch.arange(length)[:: max(1, length // 7)], [1, 5, 20]
    got = outputs_by_width(q[0][:, rows], k[0, 0], v[0, 0], rows, widths, sinks, 0.3)
    for rung, width in enumerate(widths):
        prior = ba.Sinks(ba.Window(3, width), sinks)
        wanted = ba.bayesian_attention(q, k, v, prior, softmax_scale=0.3)[0][:, rows]
        assert torch.allclose(got[rung], wanted, atol=1e-5)
    everything = ba.bayesian_attention(q, k, v, ba.Uniform(3), softmax_scale=0.3)[0][:, rows]
    assert torch.allclose(got[-1], everything, atol=1e-5)


def test_a_rung_has_attention_even_if_far_keys_outweigh_it_by_hundreds_of_nats() -> None:
    k = torch.zeros(50, 2)
    k[10, 0] = 1000.0
    q = torch.ones(1, 1, 2)
    got = outputs_by_width(q, k, torch.arange(50.0)[:, None], torch.tensor([49]), [4], 1, 1.0)
    assert got[0].item() == pytest.approx((0 + 46 + 47 + 48 + 49) / 5)
    assert got[1].item() == pytest.approx(10)


def test_reach_and_sinks_of_uniform_attention() -> None:
    q, k = torch.zeros(2, 1, 4), torch.zeros(104, 4)
    on_sinks, reach = attention_shape(q, k, torch.tensor([103]), 4, 1.0)
    assert on_sinks == pytest.approx(4 / 104)
    assert reach == 90


@pytest.mark.parametrize("length", [200, 1024, 8192, 100_000])
def test_ladders_rise_to_three_quarters_of_the_length(length: int) -> None:
    ladder = make_ladder(length)
    assert ladder == sorted(set(ladder))
    assert ladder[0] == 32
    assert ladder[-1] == length * 3 // 4
