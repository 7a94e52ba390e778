"""Sinks in models of transformers: attention, saving, and the pruning cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bayesattn as ba
from tests.adapt.cases import make_model, padding, tokens
from tests.adapt.test_cache import CLOSE, LOCAL, written
from tests.bad_inputs.rows import check_refused


def with_sinks(family: str, prior: ba.Prior, **settings: Any) -> Any:
    """A tiny model whose sinks have random log-priors."""
    model = ba.add_prior(make_model(family), ba.Sinks(prior, 3), **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("prior.log_prior"):
            torch.nn.init.normal_(parameter)
    return model


def test_each_layer_has_the_attention_of_its_sinks() -> None:
    model, x = make_model("GPT2", n_layer=1), tokens()
    layer = model.transformer.h[0]
    sinks = ba.Sinks(ba.Window(4, 5), 2, init=1.0)
    ba.add_prior(model, sinks)
    seen = {}
    layer.attn.register_forward_hook(lambda _, args, output: seen.update(given=args[0], out=output[0]))
    model(x).logits.sum().backward()
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer.attn.c_attn(seen["given"]).chunk(3, -1))
    wanted = ba.bayesian_attention(q, k, v, sinks, implementation="reference")
    torch.testing.assert_close(seen["out"], layer.attn.c_proj(wanted.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-4)
    assert layer.attn.prior.log_prior.grad.abs().min() > 0
    assert layer.attn.prior.log_prior is not sinks.log_prior


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_sinks_of_a_padded_text_are_those_of_the_text_alone(family: str) -> None:
    """Also beyond the sliding window of Mistral, and beside the sink logits of GPT-OSS."""
    model, x = with_sinks(family, LOCAL), tokens()
    mask = padding(x, "left")
    together = model(x, attention_mask=mask).logits[0, 5:]
    torch.testing.assert_close(together, model(x[:1, 5:]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_generation_with_the_pruning_cache_is_generation(family: str) -> None:
    x = tokens(length=40)
    mask = padding(x, "left")
    model = with_sinks(family, LOCAL, query_scale=ba.ScalableSoftmax(4))
    cache = model.make_cache()
    wanted = written(model, x, attention_mask=mask, use_cache=False)
    got = written(model, x, attention_mask=mask, past_key_values=cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert torch.allclose(torch.stack(got.scores), torch.stack(wanted.scores), atol=CLOSE)


def test_a_saved_model_has_its_sinks(tmp_path: Path) -> None:
    model, x = with_sinks("Llama", ba.Window(4, 9) * ba.Laplace(4, learned=True)), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert repr(loaded.model.layers[0].self_attn.prior) == repr(model.model.layers[0].self_attn.prior)


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    check_refused(lambda: with_sinks("Gemma2", LOCAL), "has softcap, with which Sinks do not work")
    check_refused(
        lambda: written(with_sinks("Mistral", LOCAL), tokens()), "drops the first tokens, which the sinks are"
    )
