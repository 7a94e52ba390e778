"""The pruning cache in models with priors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.adapt.cache import layer_cache
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


LONG = {"num_hidden_layers": 3, "max_position_embeddings": 1024}


def with_windows(family: str = "Llama") -> Any:
    """A model with windows of 40 and 300 keys and sinks in all layers but the first."""
    prior = ba.Sinks(ba.Window(4, [40, 40, 300, 300]), 4)
    return ba.add_prior(make_model(family, **LONG), prior, layers=[1, 2])


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "GPT2"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_full_prompt_is_read_by_the_original_model_and_what_follows_by_that_with_windows(
    family: str, padded: bool
) -> None:
    """Against a cache of transformers, which the original fills and the model with windows reads."""
    x = tokens(length=520)
    mask = padding(x, "left", 30 if padded else 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    original, model = make_model(family, **LONG), with_windows(family)

    def read(reader: Any, past: Any, start: int, stop: int) -> Any:
        return reader(
            x[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
            past_key_values=past, use_cache=True,
        )  # fmt: skip

    cache = model.make_cache(full_prompt=True)
    with torch.no_grad():
        first, got = read(original, None, 0, 480), read(model, cache, 0, 480)
        seen = mask[:, :480] > 0
        assert torch.allclose(got.logits[seen], first.logits[seen], atol=1e-3)
        for start, stop in ((480, 500), (500, 501), (501, 520)):
            wanted = read(model, first.past_key_values, start, stop).logits
            assert torch.allclose(read(model, cache, start, stop).logits, wanted, atol=1e-3)
    for held in cache.caches[1:]:
        assert held.bytes < 0.65 * held.full_bytes
    assert cache.caches[0].bytes > cache.caches[0].full_bytes


def test_a_full_prompt_is_the_first_call_alone_and_each_time_the_cache_is_empty() -> None:
    x, model = tokens(length=330), with_windows()
    cache = model.make_cache(full_prompt=True)
    plain = make_model("Llama", **LONG)
    with torch.no_grad():
        model(x[:, :300], past_key_values=cache)
        rest = model(x[:, 300:], past_key_values=cache).logits
        assert not torch.allclose(rest, plain(x).logits[:, 300:], atol=1e-3)
        cache.reset()
        assert torch.allclose(model(x, past_key_values=cache).logits, plain(x).logits, atol=1e-3)


def test_a_full_prompt_generates_and_searches_with_beams() -> None:
    x, model = tokens(length=300), with_windows()
    first = make_model("Llama", **LONG)(x).logits[:, -1].argmax(-1)
    for settings in ({}, {"num_beams": 3}):
        cache = model.make_cache(full_prompt=True)
        got = model.generate(
            x, past_key_values=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings
        )  # fmt: skip
        assert got.shape == (2, 305)
        assert cache.get_seq_length() == 304
        if not settings:
            assert torch.equal(got[:, 300], first)


def test_layers_with_a_window_of_their_own_keep_it_in_a_full_prompt() -> None:
    plain = make_model("Gemma3", max_position_embeddings=4096, num_hidden_layers=2)
    model = make_model("Gemma3", max_position_embeddings=4096, num_hidden_layers=2)
    ba.add_prior(model, ba.Window(4, 30), layers=[1])
    x = tokens(length=300)
    with torch.no_grad():
        got = model(x, past_key_values=model.make_cache(full_prompt=True)).logits
        assert torch.allclose(got, plain(x).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("prior", "temperature", "has"),
    [
        (ba.Laplace(4), None, "a Laplace"),
        (ba.Sinks(ba.Window(4, 9) * ba.Laplace(4)), None, "a Product"),
        (ba.Sinks(ba.Window(4, 9), init=1.0), None, "sinks whose log-prior is not 0"),
        (ba.Window(4, 9), ba.ScalableSoftmax(4), "temperatures"),
    ],
)
def test_only_windows_can_be_left_out_of_a_prompt(prior: Any, temperature: Any, has: str) -> None:
    model = ba.add_prior(make_model("Llama"), prior, temperature)
    check_refused(
        lambda: model.make_cache(full_prompt=True), f"such as fit_priors makes, and LlamaAttention has {has}; make"
    )


def test_windows_longer_than_the_first_plan_are_freed_once_the_text_is_long_enough() -> None:
    cache = layer_cache(ba.Sinks(ba.Window(2, 3000), 4))
    held = []
    for _ in range(9):
        k = torch.randn(1, 1, 1000, 2)
        q = torch.randn(1, 2, 1000, 2)
        cache.attend(q, k, k)
        held.append(cache.bytes / (2 * 2 * 4))  # positions: keys and values, size, bytes
    assert held[1] >= 2000
    assert held[-1] < 3000 + 4 + 3000 // 32 + 20
    assert cache.spans == [3000]


def test_tokens_are_taken_back_as_far_as_the_cache_was_made_for() -> None:
    x, model = tokens(length=400), with_windows()
    with torch.no_grad():
        cache = model.make_cache(rollback=12)
        wanted = model(x, past_key_values=cache).logits[:, -12:]
        cache.crop(-12)
        assert torch.allclose(model(x[:, -12:], past_key_values=cache).logits, wanted, atol=1e-3)
        none = model.make_cache()
        model(x, past_key_values=none)
        assert none.bytes < cache.bytes
        with pytest.raises(ValueError, match=r"make the cache with rollback=12 or more"):
            none.crop(-12)


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
