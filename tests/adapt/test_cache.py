"""The pruning cache in models with priors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.adapt.cases import make_model, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-4
# Distances of 30 and more have no weight in the first two heads.
LOCAL = ba.GeneralizedGaussian.from_shape([2.0, 2.0, 1.0, 0.5], [3.0, 3.0, 20.0, 20.0])


def written(model: Any, x: Tensor, **settings: Any) -> Any:
    return model.generate(
        x, max_new_tokens=30, min_new_tokens=30, do_sample=False, output_scores=True, return_dict_in_generate=True,
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "GPT2"])
def test_generation_with_the_pruning_cache_is_generation(family: str) -> None:
    x = tokens(length=40)
    mask = padding(x, "left")
    model = ba.add_prior(make_model(family), LOCAL, ba.ScalableSoftmax(4))
    cache = model.make_cache()
    wanted = written(model, x, attention_mask=mask)
    got = written(model, x, attention_mask=mask, past_key_values=cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert torch.allclose(torch.stack(got.scores), torch.stack(wanted.scores), atol=CLOSE)
    assert cache.get_seq_length() == 69


def test_local_heads_keep_few_keys() -> None:
    """Two query heads share a key head, which keeps what either needs; a layer without a prior keeps everything."""
    model = ba.add_prior(make_model("Llama"), ba.Window(4, [9, 20, 9, 9]), layers=[0])
    cache = model.make_cache()
    written(model, tokens(length=300), past_key_values=cache)
    assert [layer.spans for layer in cache.caches] == [[20, 9], [None, None]]
    assert cache.caches[0].bytes < 0.5 * cache.caches[0].full_bytes


def test_a_copy_of_the_cache_goes_on_by_itself() -> None:
    x = tokens(length=40)
    model = ba.add_prior(make_model("Llama"), LOCAL)
    cache = model.make_cache()
    with torch.no_grad():
        model(x[:, :30], past_key_values=cache)
        first = model(x[:, 30:], past_key_values=copy.deepcopy(cache)).logits
        assert torch.equal(model(x[:, 30:], past_key_values=cache).logits, first)


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = (ba.add_prior(make_model("Llama"), prior) for prior in (LOCAL, ba.Laplace(4)))
    check_refused(
        lambda: written(model, tokens(length=40), past_key_values=other.make_cache()), "is the cache of another model"
    )


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    x = tokens()
    model = ba.add_prior(make_model("Llama"), LOCAL)
    with torch.no_grad():
        right = padding(x, "right")
        check_refused(lambda: model(x, attention_mask=right, past_key_values=model.make_cache()), "padding on the left")
        left, cache = padding(x, "left"), model.make_cache()
        model(x[:, :3], attention_mask=left[:, :3], past_key_values=cache)
        check_refused(lambda: model(x[:, 3:], attention_mask=left, past_key_values=cache), "padding goes on after")
        for family in ("Gemma2", "GptOss"):
            other = ba.add_prior(make_model(family), LOCAL)
            check_refused(lambda other=other: other(x, past_key_values=other.make_cache()), "softcap and sinks")
        broken = ba.add_prior(make_model("Llama"), LOCAL)
        cache = broken.make_cache()
        cache.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), 0)
        check_refused(lambda: broken(x, past_key_values=cache), "take a new cache")
    check_refused(lambda: model(x, past_key_values=model.make_cache()), "use it with torch.no_grad()")
    check_refused(lambda: model.make_cache(tolerance=2.0), "it must be a number in [0, 1)")
    model.model.layers[0].self_attn.prior = torch.nn.Sequential(LOCAL)
    check_refused(lambda: model.make_cache(), "the prior is wrapped in a Sequential")
