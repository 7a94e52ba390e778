"""Attention in two parts against its formula, written out densely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bayesattn.attention.near_far import near_far_attention, near_keys
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5


def formula(
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    v: Tensor,
    window: int,
    log_prior: Tensor | None = None,
    *,
    far_keys: int | None = None,
    query_scale: Tensor | None = None,
    scale_prior: bool = True,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Σ_j softmax_j(logit_ij) v_j, with every logit written out; zeros for a query that sees no key."""
    (batch, heads, queries, size), keys = near[0].shape, v.shape[2]
    group = heads // v.shape[1]
    position = torch.arange(keys - queries, keys)[:, None]
    distance = position - torch.arange(keys)
    of_near, of_far = (q @ k.repeat_interleave(group, 1).mT * size**-0.5 for q, k in (near, far))
    content = torch.where(distance < window, of_near, of_far)
    prior = torch.zeros(heads, keys) if log_prior is None else log_prior
    prior = prior.to(content.dtype)[:, distance.clamp(min=0)]
    scale = torch.ones(heads, queries) if query_scale is None else query_scale
    scale = scale.to(content.dtype)[..., None]
    hidden = prior.isneginf()
    prior = prior.masked_fill(hidden, 0.0)
    logits = scale * (content + prior) if scale_prior else scale * content + prior
    ids = torch.zeros(batch, keys, dtype=torch.long) if document_ids is None else document_ids
    own = ids[:, keys - queries :, None]
    visible = (own == ids[:, None]) & (own >= 0) & (distance >= 0)
    if far_keys is not None:
        first = torch.stack([(row[:, None] == row).int().argmax(1) for row in ids])  # where each document begins
        visible = visible & ((distance < window) | (torch.arange(keys) - first < far_keys)[:, None])
    hidden = hidden | ~visible[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0) @ v.repeat_interleave(group, 1)


def inputs(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> Any:
    """Queries and keys of both parts, and values."""

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 8, dtype=dtype, requires_grad=True)

    return (
        (draw(heads, queries), draw(kv_heads, keys)),
        (draw(heads, queries), draw(kv_heads, keys)),
        draw(kv_heads, keys),
    )


def ids_of(*lengths: int) -> Tensor:
    """Ids of documents of these lengths, the first of them padding; in the second sequence another way round."""
    one = torch.cat([torch.full((length,), number - 1) for number, length in enumerate(lengths)])
    other = torch.cat([torch.full((length,), number) for number, length in enumerate(reversed(lengths))])
    return torch.stack([one, other])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures": {"query_scale": 0.5 + torch.rand(4, 63, dtype=torch.float64)},
    "temperatures of each sequence": {"query_scale": 0.5 + torch.rand(2, 4, 63, dtype=torch.float64)},
    "a prior": {"log_prior": -0.1 * torch.arange(63.0, dtype=torch.float64).expand(4, -1)},
    "a prior that is not scaled": {
        "log_prior": -0.1 * torch.arange(63.0, dtype=torch.float64).expand(4, -1),
        "query_scale": 0.5 + torch.rand(4, 63, dtype=torch.float64),
        "scale_prior": False,
    },
    "documents": {"document_ids": ids_of(5, 21, 1, 36)},
    "one key of each document": {"document_ids": ids_of(5, 21, 1, 36), "far_keys": 1},
    "the first keys": {"far_keys": 4},
}


@pytest.mark.parametrize("window", [1, 7, 62, 63, 200])
@pytest.mark.parametrize("name", SETTINGS)
def test_both_parts_are_the_formula_with_its_gradients(name: str, window: int) -> None:
    near, far, v = inputs(63, 63)
    tensors = [*near, *far, v]
    wanted = formula(near, far, v, window, **SETTINGS[name])
    out = near_far_attention(near, far, v, window, **SETTINGS[name])
    assert torch.allclose(out, wanted, atol=1e-10)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(wanted, tensors, grad, allow_unused=True, materialize_grads=True)
    given = torch.autograd.grad(out, tensors, grad, allow_unused=True, materialize_grads=True)
    for a, b in zip(given, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "sdpa"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (5, 40), (40, 40), (0, 3)])
def test_the_last_queries_need_the_last_keys_of_the_window_and_all_far_ones(
    implementation: str, queries: int, keys: int
) -> None:
    near, far, v = inputs(queries, keys, dtype=torch.float32)
    window = 9
    wanted = formula(near, far, v, window)
    needed = near_keys(queries, keys, window)
    of_near = near[0], near[1][:, :, keys - needed :]
    of_far = far[0], far[1][:, :, : max(0, keys - window)]
    out = near_far_attention(of_near, of_far, v, window, implementation=implementation)
    assert torch.allclose(out, wanted, atol=CLOSE)


def test_one_head_and_strides_of_any_kind() -> None:
    near, far, v = inputs(31, 31, heads=1, kv_heads=1)
    mixed = [x.detach().transpose(1, 3).contiguous().transpose(1, 3) for x in (*near, *far, v)]
    out = near_far_attention((mixed[0], mixed[1]), (mixed[2], mixed[3]), mixed[4], 10)
    assert torch.allclose(out, formula(near, far, v, 10))


def test_in_bf16_the_error_is_at_most_twice_that_of_rounding_the_inputs() -> None:
    near, far, v = inputs(129, 129)
    exact = formula(near, far, v, 20)
    rounded = [x.detach().bfloat16() for x in (*near, *far, v)]
    plain = formula((rounded[0], rounded[1]), (rounded[2], rounded[3]), rounded[4], 20)
    out = near_far_attention((rounded[0], rounded[1]), (rounded[2], rounded[3]), rounded[4], 20)
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_equal_parts_are_plain_attention() -> None:
    near, _, v = inputs(50, 50)
    wanted = torch.nn.functional.scaled_dot_product_attention(*near, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(near_far_attention(near, near, v, 8), wanted)


def test_bad_parts_are_refused() -> None:
    near, far, v = inputs(20, 20)
    short = far[0], far[1][:, :, :3]
    for given, words in (
        (lambda: near_far_attention(near, far, v, 0), "window is 0; a whole number of tokens"),
        (lambda: near_far_attention(near, far, v, 2.5), "window is 2.5"),  # type: ignore[arg-type]
        (lambda: near_far_attention(near, far, v, 4, far_keys=0), "far_keys is 0; a whole number of keys"),
        (lambda: near_far_attention(near, short, v, 4), "the far part has 3 keys; at least 16 are needed"),
        (lambda: near_far_attention(short, far, v, 4), "the near part has 3 keys; at least 20 are needed"),
    ):
        check_refused(given, words)
