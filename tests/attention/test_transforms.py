"""The transforms of torch are recognised, whatever torch calls them inside."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bayesattn.attention import transforms


def test_nothing_is_at_work_by_default() -> None:
    assert not transforms.in_forward_mode()
    assert not transforms.in_torch_func()
    assert not transforms.in_vmap()


def test_forward_mode_is_recognised() -> None:
    with forward_ad.dual_level():
        assert transforms.in_forward_mode()
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(transforms.in_forward_mode())
        return x

    torch.func.jvp(look, (torch.ones(1),), (torch.ones(1),))
    assert seen == [True]


def test_gradients_and_vmap_are_told_apart() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((transforms.in_torch_func(), transforms.in_vmap()))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 2))
    assert seen == [(True, False), (True, True), (True, True)]
