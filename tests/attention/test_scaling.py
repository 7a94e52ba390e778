from __future__ import annotations

import importlib
import math

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


LAWS = {
    "llama 4": lambda heads: ba.Llama4Scaling(heads, length=6),
    "mistral": lambda heads: ba.MistralScaling(heads, length=6),
    "inkling": lambda heads: ba.InklingScaling(heads, 6),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_fixed_law_is_one_for_short_texts_and_grows_with_length(law: str) -> None:
    scale = LAWS[law](3)
    counts = torch.arange(0, 100)
    r = scale(counts)
    assert r.shape == (3, 100)
    assert torch.equal(r[:, :6], torch.ones(3, 6))
    assert (r.diff() >= 0).all()
    assert 1 + 0.1 * math.log(16) <= r[0, -1] <= 1 + 0.1 * math.log(18)
    assert scale(counts.expand(2, 100)).shape == (2, 3, 100)
    assert scale(counts.double()).dtype == torch.float64
    q = torch.randn(1, 3, 20, 4)
    by_tensor = ba.bayesian_attention(q, q, q, ba.Laplace(3), query_scale=scale(torch.arange(1, 21)))
    assert torch.equal(ba.bayesian_attention(q, q, q, ba.Laplace(3), query_scale=scale), by_tensor)


def heads_of(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    return x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)  # type: ignore[arg-type]


def future_mask(n: int) -> torch.Tensor:
    return torch.full((n, n), -torch.inf).triu(1)[None, None]


def test_attention_with_the_law_of_llama_4_is_that_of_transformers() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextConfig

    config = Llama4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=6, attn_scale=0.4,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer, x = Llama4TextAttention(config, 0), torch.randn(2, 40, 32)
    theirs, _ = layer(x, (None, None), future_mask(40))
    q, k, v = (heads_of(project(x), layer) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    scale = ba.Llama4Scaling(4, strength=0.4, length=6)
    ours = ba.bayesian_attention(q, k, v, query_scale=scale)
    torch.testing.assert_close(layer.o_proj(ours.transpose(1, 2).flatten(2)), theirs)


@pytest.mark.parametrize("model", ["ministral3", "mistral4"])
def test_the_law_of_mistral_is_that_of_transformers(model: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    theirs = modeling.get_llama_4_attn_scale(torch.arange(100)[None], 0.3, 7)  # [1, 1, positions, 1]
    ours = ba.MistralScaling(2, strength=0.3, length=7)(torch.arange(1, 101))
    torch.testing.assert_close(ours, theirs.squeeze(-1)[0].expand(2, -1))


def test_attention_with_the_law_of_inkling_is_that_of_transformers() -> None:
    from transformers.models.inkling.modeling_inkling import InklingAttention, InklingTextConfig

    config = InklingTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, d_rel=3,
        rel_extent=9, log_scaling_n_floor=6, log_scaling_alpha=0.4, layer_types=["full_attention"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer, x = InklingAttention(config, 0), torch.randn(1, 40, 32)
    bank = ba.ProfileBank(4, 32, rank=3, extent=9)
    with torch.no_grad():
        layer.rel_logits_proj.proj.normal_()
        bank.bank.copy_(layer.rel_logits_proj.proj)
        bank.mixture.weight.copy_(layer.r_proj.weight)
    theirs, _ = layer(x, future_mask(40), None)
    q, k = layer.q_norm(heads_of(layer.q_proj(x), layer)), layer.k_norm(heads_of(layer.k_sconv(layer.k_proj(x)), layer))
    v = heads_of(layer.v_sconv(layer.v_proj(x)), layer)
    scale = ba.InklingScaling(4, 6, strength=0.4)
    ours = ba.bayesian_attention(q, k, v, bank.given(x), query_scale=scale, softmax_scale=1 / 8)
    torch.testing.assert_close(layer.o_proj(ours.transpose(1, 2).flatten(2)), theirs)
