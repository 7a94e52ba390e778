from __future__ import annotations

import pytest
import torch

from bayesattn.studies.convergence.prefixes import prefix_attention


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("grid", [[1], [7, 8, 50], [33, 100]])
def test_every_part_is_dense_attention_over_it(heads: tuple[int, ...], grid: list[int]) -> None:
    q, k, v = torch.randn(*heads, 11, 5), torch.randn(*heads, 100, 5), torch.randn(*heads, 100, 4)
    scales = torch.tensor([0.1, 1.0, 30.0])
    outputs = list(prefix_attention(q, k, v, grid, scales))
    assert len(outputs) == len(grid)
    for n, out in zip(grid, outputs, strict=True):
        for row, scale in enumerate(scales):
            dense = (scale * q @ k[..., :n, :].mT).softmax(-1) @ v[..., :n, :]
            assert torch.allclose(out[row], dense, atol=1e-5)


def test_the_tile_does_not_change_the_result() -> None:
    q, k, v = torch.randn(20, 5), torch.randn(90, 5), torch.randn(90, 4)
    whole = list(prefix_attention(q, k, v, [40, 90], torch.tensor([2.0])))
    tiled = prefix_attention(q, k, v, [40, 90], torch.tensor([2.0]), tile=(3, 7))
    for a, b in zip(whole, tiled, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_prior_is_added_to_the_logits() -> None:
    q, k, v = torch.randn(4, 5), torch.randn(30, 5), torch.randn(30, 2)
    table = -torch.rand(2, 30) * 5
    (out,) = prefix_attention(q, k, v, [30], torch.ones(2), table)
    for row in range(2):
        assert torch.allclose(out[row], (q @ k.T + table[row]).softmax(-1) @ v, atol=1e-5)


def test_huge_logits_give_hardmax() -> None:
    q, k, v = 1e3 * torch.randn(6, 5), torch.randn(60, 5), torch.randn(60, 2)
    for n, out in zip((20, 60), prefix_attention(q, k, v, [20, 60], torch.tensor([1.0, 50.0])), strict=True):
        assert out.isfinite().all()
        assert torch.allclose(out[1], v[(q @ k[:n].T).argmax(-1)], atol=1e-4)
