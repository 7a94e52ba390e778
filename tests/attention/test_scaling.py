from __future__ import annotations

import math
from collections.abc import Callable

import pytest
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


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ba.ScalableSoftmax(-1), "num_heads is -1; a whole number of heads from 1 to 65,536 is needed"),
        (lambda: ba.ScalableSoftmax(2, grows_with_length=[True]), r"grows_with_length is \[True\]; a sequence of 2"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
