from __future__ import annotations

from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.attention.kernels import reference, sdpa
from tests.attention.cases import random_case


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize(
    "settings",
    [{}, {"scaled": None}, {"scaled": "batch", "kv_heads": 2}, {"documents": True}, {"causal": False}],
    ids=str,
)
def test_the_number_of_rows_at_a_time_changes_nothing(rows: int, settings: dict[str, Any]) -> None:
    problem = random_case(31, 45, hidden=0.2, **settings).problem()
    three_of_four_heads = sdpa.BlockLimits(most_rows=rows, written_rows=rows, written_elements=rows * 45 * 3)
    torch.testing.assert_close(sdpa.forward(problem, three_of_four_heads).out, reference.forward(problem).out)


def test_the_bias_is_a_view_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    real = sdpa.fused_attention

    def spy(*args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(sdpa, "fused_attention", spy)
    random_case(300, scaled=None).attend("sdpa")
    assert masks
    for mask in masks:
        assert mask.stride()[-2:] == (1, 1)
        assert mask.untyped_storage().nbytes() <= 4 * 600 * 8


def test_inputs_of_other_strides_stay_with_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []
    real = sdpa.fused_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        strides.extend(x.stride(-1) for x in (q, k, v))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(sdpa, "fused_attention", spy)
    q, k, v = (torch.randn(1, 2, 8, 20).transpose(2, 3) for _ in range(3))
    ba.bayesian_attention(q, k, v, implementation="sdpa")
    assert set(strides) == {1}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tokens", [1, 7, 300, 2500])
def test_a_uniform_prior_gives_the_very_numbers_of_plain_attention(tokens: int, kv_heads: int) -> None:
    q, k, v = torch.randn(2, 4, tokens, 16), torch.randn(2, kv_heads, tokens, 16), torch.randn(2, kv_heads, tokens, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(ba.bayesian_attention(q, k, v), plain)
    assert torch.equal(ba.bayesian_attention(q, k, v, ba.Uniform(4)), plain)
    scale = torch.rand(4, tokens) + 0.5
    for settings in ({"query_scale": scale}, {"query_scale": scale, "scale_prior": False}):
        out = ba.bayesian_attention(q, k, v, implementation="sdpa", **settings)  # type: ignore[arg-type]
        expected = ba.bayesian_attention(q, k, v, implementation="reference", **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-46, 1e-44])
def test_any_scale_of_logits_hides_the_future(scale: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    expected = ba.bayesian_attention(q, k, v, softmax_scale=scale, implementation="reference")
    torch.testing.assert_close(ba.bayesian_attention(q, k, v, softmax_scale=scale), expected)
    cache = ba.LayerCache(ba.Uniform(2), softmax_scale=scale)
    torch.testing.assert_close(cache.attend(q, k, v), expected)


@pytest.mark.parametrize("which", ["window", "documents", "both ways", "fewer queries"])
def test_what_is_not_plain_is_not_taken_for_it(which: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    settings: dict[str, Any] = {"document_ids": torch.arange(40)[None] // 11} if which == "documents" else {}
    settings |= {"causal": False} if which == "both ways" else {}
    prior = ba.Window(2, 39) if which == "window" else ba.Uniform(2)
    q = q[:, :, 9:] if which == "fewer queries" else q
    out, expected = (
        ba.bayesian_attention(q, k, v, prior, implementation=name, **settings) for name in ("sdpa", "reference")
    )
    torch.testing.assert_close(out, expected)


def test_packed_documents_cost_their_own_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []
    real = sdpa.fused_attention

    def spy(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        work.append(q.shape[2] * k.shape[2])
        return real(q, k, *args, **kwargs)

    monkeypatch.setattr(sdpa, "fused_attention", spy)
    q = torch.randn(1, 1, 120, 4)
    ba.bayesian_attention(q, q, q, document_ids=torch.arange(120)[None] // 10, implementation="sdpa")
    assert work == [100] * 12


@pytest.mark.parametrize(
    ("device", "value_size", "message"),
    [
        ("cpu", 3, "'sdpa' needs v to have the head size of q, 8, and v has 3; use 'blockwise'"),
        ("meta", 8, "'sdpa' runs on the CPU only and the inputs are on meta"),
    ],
)
def test_it_says_what_it_cannot_do(device: str, value_size: int, message: str) -> None:
    q, v = (torch.zeros(1, 2, 5, size, device=device) for size in (8, value_size))
    with pytest.raises(ValueError, match=message):
        ba.bayesian_attention(q, q, v, implementation="sdpa")


def test_auto_takes_another_kernel_where_it_cannot() -> None:
    q, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 3)
    expected = ba.bayesian_attention(q, q, v, implementation="reference")
    torch.testing.assert_close(ba.bayesian_attention(q, q, v), expected)
