"""BLOOM, MPT and Falcon with a prior are what transformers computes, and learn more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.adapt.alibi_models import convert_alibi
from bayesattn.errors import UserError
from tests.bad_inputs.rows import check_sentence
from tests.models.alibi.sources import CONFIGURATIONS, make_source
from tests.models.cases import tokens

sources = pytest.mark.parametrize("name", CONFIGURATIONS)
families = pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, new decoder"])


@sources
@pytest.mark.parametrize("prior", ["laplace", "bam"])
@torch.no_grad()
def test_the_logits_are_those_of_the_source(name: str, prior: str) -> None:
    source, ids = make_source(name), tokens()
    model = convert_alibi(source, prior)
    torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-4, rtol=0)
    assert source(ids).logits.std() > 1  # so that the tolerance says something


@sources
@torch.no_grad()
def test_padding_on_either_side_and_generation_are_those_of_the_source(name: str) -> None:
    source, ids = make_source(name), tokens(length=20)
    model = convert_alibi(source)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :8] = 0
    right[0, -6:] = 0
    for mask in (left, right):
        logits = [each(ids, attention_mask=mask).logits[mask.bool()] for each in (model, source)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    settings = {"attention_mask": left, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 59}
    assert torch.equal(model.generate(ids, **settings), source.generate(ids, **settings))
    assert torch.equal(model.generate(ids, num_beams=3, **settings), source.generate(ids, num_beams=3, **settings))


@families
@torch.no_grad()
def test_the_pruning_cache_and_packed_documents_change_nothing(name: str) -> None:
    model, ids = convert_alibi(make_source(name)), tokens()
    model.model.chunk_size = 11
    whole = model(ids).logits
    cache = model.make_cache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 9], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-5, rtol=0)
    documents = torch.tensor([[0] * 12 + [1] * 18] * 2)
    packed = model(ids, document_ids=documents).logits
    alone = torch.cat([model(ids[:, :12]).logits, model(ids[:, 12:]).logits], 1)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    assert not torch.allclose(packed, whole, atol=1e-2)


@families
def test_slopes_learn_and_are_saved(name: str, tmp_path: Path) -> None:
    model, ids = convert_alibi(make_source(name)), tokens()
    model.train()
    model.gradient_checkpointing_enable()
    priors = [layer.self_attn.prior for layer in model.model.layers]
    before = [prior.slopes.detach().clone() for prior in priors]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert all(not torch.equal(prior.slopes, start) for prior, start in zip(priors, before, strict=True))
    assert model(ids, labels=ids).loss < loss
    model.eval().save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, ba.load_model):
        loaded = load(tmp_path)
        assert type(loaded) is type(model)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_slopes_stay_in_float32_in_a_model_of_half_precision(tmp_path: Path) -> None:
    convert_alibi(make_source("bloom")).save_pretrained(tmp_path)
    model = ba.load_model(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half.model.layers[0].self_attn.prior.slopes, model.model.layers[0].self_attn.prior.slopes)
    with torch.no_grad():
        assert (
            torch.nn.functional.cosine_similarity(half(tokens()).logits.float(), model(tokens()).logits, -1).min()
            > 0.99
        )


def test_the_slopes_are_those_of_the_sources_formulas() -> None:
    torch.testing.assert_close(ba.BayesBloomConfig(n_head=6, hidden_size=48).slopes(), ba.alibi_slopes(6))
    torch.testing.assert_close(ba.BayesMptConfig(n_heads=12, d_model=48).slopes(), ba.alibi_slopes(12))
    steep = ba.BayesMptConfig(n_heads=4, attn_config={"alibi_bias_max": 16}).slopes()
    torch.testing.assert_close(steep, torch.tensor([2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16]))
    falcon = ba.BayesFalconConfig(num_attention_heads=8, hidden_size=32).slopes()
    torch.testing.assert_close(falcon, ba.alibi_slopes(8) / 2)


def test_falcon_is_converted_by_its_formula_and_not_by_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.falcon import modeling_falcon

    def unrounded(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        places = (mask.cumsum(-1) - 1) * mask
        slopes = ba.alibi_slopes(heads).bfloat16().float()
        return (slopes[:, None] * places[:, None]).reshape(len(mask) * heads, 1, -1).to(dtype)

    ids = tokens()
    source = make_source("falcon-rw", num_attention_heads=12, hidden_size=96, num_kv_heads=12)
    model = convert_alibi(source)
    with torch.no_grad():
        rounded = source(ids).logits
        monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", unrounded)
        torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-4, rtol=0)
        assert (model(ids).logits - rounded).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("bloom", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is false"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is true"),
        ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "attn_config.alibi_bias_max is 0"),
        ("falcon-rw", {"alibi": False}, "rotary positions; a model with ALiBi is needed"),
    ],
)
def test_what_no_prior_expresses_gets_one_sentence(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        convert_alibi(make_source(name, **changes))
    check_sentence(str(caught.value), says)


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (ba.BayesBloomConfig, {"prior": "alibi"}, "prior is 'alibi'; allowed are laplace, bam"),
        (ba.BayesMptConfig, {"prior": 3}, "prior is 3; a word is needed"),
        (ba.BayesFalconConfig, {"tolerance": 1.0}, "tolerance is 1.0; 0 ≤ tolerance < 1 is needed"),
        (ba.BayesBloomConfig, {"n_head": 0}, "num_attention_heads is 0"),
        (ba.BayesMptConfig, {"d_model": 30, "n_heads": 4}, "hidden_size 30 does not divide by 4 heads"),
    ],
)
def test_settings_that_cannot_be_get_one_sentence(config: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        config(**settings)
    check_sentence(str(caught.value), says)
