"""A learned sink logit is one more key, of value zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba
from tests.attention.cases import KERNELS


def sink_logit(heads: int, dtype: torch.dtype = torch.float64) -> ba.SinkLogit:
    made = ba.SinkLogit(heads).to(dtype)
    nn.init.normal_(made.s)
    return made


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
def test_a_sink_logit_is_a_key_of_value_zero(kernel: str) -> None:
    prior, sink = ba.Laplace(4, learned=True), sink_logit(4)
    tensors = [torch.randn(2, heads, 20, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    learned = [*tensors, prior.slopes, sink.s]
    out = sink(*ba.attention_with_lse(*tensors, prior, implementation=kernel))

    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in tensors)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    logits = q @ k.mT / 8**0.5 + prior(distance.double())
    logits = torch.cat([logits.masked_fill(distance < 0, -torch.inf), sink.s.view(4, 1, 1).expand(2, 4, 20, 1)], -1)
    expected = logits.softmax(-1) @ torch.cat([v, torch.zeros(2, 4, 1, 8, dtype=torch.float64)], 2)
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(out.sin().sum(), learned)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sin().sum(), learned))


def test_it_is_what_gpt_oss_computes() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    sink = sink_logit(4, torch.float32)
    layer = nn.Module()
    layer.sinks, layer.num_key_value_groups = sink.s, 2  # type: ignore[assignment]
    q, k, v = (torch.randn(2, heads, 20, 8) for heads in (4, 2, 2))
    mask = torch.full((1, 1, 20, 20), -torch.inf).triu(1)
    theirs, _ = eager_attention_forward(layer, q, k, v, mask, scaling=8**-0.5)
    torch.testing.assert_close(sink(*ba.attention_with_lse(q, k, v)).transpose(1, 2), theirs)


def test_a_query_that_sees_no_key_keeps_its_zeros_and_passes_no_gradient() -> None:
    sink = sink_logit(2, torch.float32)
    tensors = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    out = sink(*ba.attention_with_lse(*tensors, document_ids=torch.tensor([[-1, -1, 0, 0, 0]])))
    assert not out[:, :, :2].any()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), [*tensors, sink.s]))


def test_the_output_keeps_its_dtype() -> None:
    q = torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    out, lse = ba.attention_with_lse(q, q, q)
    assert ba.SinkLogit(2)(out, lse).dtype == torch.bfloat16


def test_sinks_and_a_sink_logit_combine() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 4)
    sinks, sink = ba.Sinks(ba.Window(2, 3), 2), ba.SinkLogit(2, init=-100.0)
    expected: Tensor = ba.bayesian_attention(q, k, v, sinks)
    torch.testing.assert_close(sink(*ba.attention_with_lse(q, k, v, sinks)), expected)
