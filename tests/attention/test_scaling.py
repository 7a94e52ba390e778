from __future__ import annotations

import math

import torch

import bayesattn as ba


def test_scalable_softmax_is_s_log_n() -> None:
    scale = ba.ScalableSoftmax(2, init=0.5)
    counts = torch.tensor([0, 1, 2, 100])
    expected = 0.5 * torch.tensor([0.0, 0.0, math.log(2), math.log(100)])
    torch.testing.assert_close(scale(counts), expected.expand(2, 4))
    assert scale(counts.expand(3, 4)).shape == (3, 2, 4)


def test_heads_that_do_not_grow_have_a_constant_temperature() -> None:
    scale = ba.ScalableSoftmax(2, init=0.5, grows_with_length=[True, False])
    torch.testing.assert_close(scale(torch.tensor([1, 100])), torch.tensor([[0.0, 0.5 * math.log(100)], [0.5, 0.5]]))
