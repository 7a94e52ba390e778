"""The reference against arithmetic done one number at a time, and against what others call the same thing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import bayesattn as ba
from bayesattn.attention.kernels.reference import softmax_posterior
from tests.attention.cases import Case, random_case


def by_hand(case: Case) -> torch.Tensor:
    """The docstring of `bayesian_attention`, one query and one key at a time."""
    settings = case.settings
    batch, heads, queries, size = case.q.shape
    kv_heads, keys = case.k.shape[1:3]
    offset = settings.get("query_offset")
    offset = keys - queries if offset is None else offset
    causal = settings.get("causal", True)
    zero = 0 if causal else case.table.shape[1] // 2
    ids = settings.get("document_ids")
    out = torch.zeros_like(case.q)
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(queries):
                scale = 1.0
                if case.query_scale is not None:
                    scale = float(case.query_scale[h, i] if case.query_scale.dim() == 2 else case.query_scale[b, h, i])
                logits, values = [], []
                for j in range(keys):
                    distance = offset + i - j
                    if causal and distance < 0:
                        continue
                    if ids is not None and (ids[b, offset + i] != ids[b, j] or ids[b, j] < 0):
                        continue
                    log_prior = float(case.table[h, zero + distance])
                    if log_prior == -math.inf:
                        continue
                    content = float(case.q[b, h, i] @ case.k[b, g, j]) / math.sqrt(size)
                    scaled = settings.get("scale_prior", True)
                    logits.append(scale * (content + log_prior) if scaled else scale * content + log_prior)
                    values.append(case.v[b, g, j])
                if logits:
                    top = max(logits)
                    weights = [math.exp(x - top) for x in logits]
                    out[b, h, i] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("scale_prior", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(9, 9, None), (3, 9, None), (4, 9, 2), (1, 1, None)])
def test_reference_is_the_formula(
    queries: int, keys: int, offset: int | None, causal: bool, scale_prior: bool, documents: bool
) -> None:
    case = random_case(
        queries,
        keys,
        kv_heads=2,
        hidden=0.2,
        documents=documents,
        scaled="batch",
        causal=causal,
        scale_prior=scale_prior,
        query_offset=offset,
    )
    torch.testing.assert_close(case.attend("reference"), by_hand(case))
    torch.testing.assert_close(case.attend_plainly(), by_hand(case))


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_uniform_prior_is_plain_attention(causal: bool, implementation: str) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
    for prior in (ba.Uniform(4), None):
        ours = ba.bayesian_attention(q, k, v, prior, causal=causal, implementation=implementation)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("heads", [4, 6])
def test_laplace_prior_is_the_alibi_of_bloom(heads: int, implementation: str) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    n = 45
    q, k, v = (torch.randn(1, heads, n, 16) for _ in range(3))
    alibi = build_alibi_tensor(torch.ones(1, n), heads, torch.float32).view(1, heads, 1, n)
    mask = torch.ones(n, n).tril().log()
    expected = scaled_dot_product_attention(q, k, v, attn_mask=alibi + mask)
    ours = ba.bayesian_attention(q, k, v, ba.Laplace(heads), implementation=implementation)
    torch.testing.assert_close(ours, expected)


def test_laplace_prior_is_the_alibi_of_mpt() -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    n, heads = 45, 8
    q, k, v = (torch.randn(1, heads, n, 16) for _ in range(3))
    alibi = build_mpt_alibi_tensor(heads, n).view(1, heads, 1, n)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=alibi + torch.ones(n, n).tril().log())
    torch.testing.assert_close(ba.bayesian_attention(q, k, v, ba.Laplace(heads)), expected)


def test_a_product_of_priors_is_the_sum_of_their_biases() -> None:
    n = 40
    q, k, v = (torch.randn(1, 4, n, 16) for _ in range(3))
    a, b = ba.KerpleLog(4), ba.Laplace(4)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    bias = a(distance) + b(distance) + torch.ones(n, n).tril().log()
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
    torch.testing.assert_close(ba.bayesian_attention(q, k, v, a * b), expected)


def test_posterior_is_content_times_prior_normalised() -> None:
    n = 20
    q, k = torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8)
    prior = ba.GeneralizedGaussian.from_shape([-0.5], [3.0])
    posterior = ba.posterior(q, k, prior)[0, 0, -1]
    content = (q[0, 0, -1] @ k[0, 0].T / math.sqrt(8)).softmax(-1)
    believed = prior.log_probability(n).exp()[0].flip(0).float()
    torch.testing.assert_close(posterior, content * believed / (content * believed).sum())


@pytest.mark.parametrize("scale_prior", [False, True])
@pytest.mark.parametrize("scale", [None, -1.0, 0.0, 2.0])
def test_gradients_are_finite_wherever_keys_are_hidden(scale: float | None, scale_prior: bool) -> None:
    content = torch.randn(2, 3, 4, 5, requires_grad=True)
    log_prior = torch.randn(3, 4, 5)
    log_prior[0, :, :2] = -torch.inf  # hidden by the prior, by the mask, and by both
    visible = torch.rand(2, 1, 4, 5) < 0.5
    visible[0, 0, 0] = False
    log_prior[2, 1] = -torch.inf
    log_prior.requires_grad_()
    query_scale = None if scale is None else torch.full((3, 4, 1), scale, requires_grad=True)
    weights = softmax_posterior(content, log_prior, visible, query_scale, scale_prior)

    hidden = ~visible | log_prior.isneginf()
    assert not weights[hidden].any()
    torch.testing.assert_close(weights.sum(-1), (~hidden).any(-1).float())
    inputs = [content, log_prior, *([] if query_scale is None else [query_scale])]
    for x, gradient in zip(inputs, torch.autograd.grad(weights.square().sum(), inputs), strict=True):
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()


def test_several_sets_of_keys_have_one_posterior() -> None:
    content, log_prior = torch.randn(2, 1, 6, 9), torch.randn(1, 6, 9)
    whole = softmax_posterior(content, log_prior, torch.ones(9, dtype=torch.bool), None, True)
    torch.testing.assert_close(whole, (content + log_prior).softmax(-1))
    half = softmax_posterior(content, log_prior, torch.arange(9) < 4, None, True)
    torch.testing.assert_close(half[..., :4], (content + log_prior)[..., :4].softmax(-1))
