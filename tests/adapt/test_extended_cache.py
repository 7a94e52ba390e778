"""The pruning cache of extended models: near heads keep a window and sinks, and every logit is that without a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import bayesattn as ba
from tests.adapt.cases import make_model, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-4
PIECES = [340, 1, 1, 660, 1, 1, 1, 350, 1, 44]
LENGTH = sum(PIECES)


def extended(family: str = "Llama", near: Any = ((0, 1), (1, 0)), **settings: Any) -> Any:
    """A model that was trained to 100 tokens, say."""
    return ba.extend(make_model(family), 40, train_length=100, near=near, **settings)


def read(model: Any, x: torch.Tensor, cache: Any, pieces: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits, piece by piece."""
    parts: list[torch.Tensor] = []
    with torch.no_grad():
        for piece in x.split(pieces, 1):
            done = cache.get_seq_length() + piece.shape[1]
            given = {} if mask is None else {"attention_mask": mask[:, :done]}
            parts.append(model(piece, past_key_values=cache, **given).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("family", "near", "settings"),
    [
        ("Llama", [(0, 1), (1, 0)], {}),
        ("Llama", [(0, 0), (0, 1)], {"temperature": None, "sinks": 1}),
        ("Llama", None, {"sinks": 50}),
        ("Llama", None, {"group": 8}),
        ("GPTNeoX", [(0, 0), (0, 2), (1, 0), (1, 3)], {}),
        ("SmolLM3", [(0, 1)], {}),
        ("Qwen3", [(0, 1), (1, 1)], {}),
    ],
)
@pytest.mark.parametrize("count", [0, 60, 333])
def test_logits_are_those_without_a_cache(family: str, near: Any, settings: dict[str, Any], count: int) -> None:
    """Padding of the first sequence ends before, in or after what is evicted by the end of a piece."""
    model, x = extended(family, near, **settings), tokens(2, LENGTH)
    mask = padding(x, "left", count) if count else None
    with torch.no_grad():
        wanted = model(x, attention_mask=mask, use_cache=False).logits
    cache = model.make_cache()
    logits = read(model, x, cache, PIECES, mask)
    assert torch.allclose(logits[0, count:], wanted[0, count:], atol=CLOSE)
    assert torch.allclose(logits[1], wanted[1], atol=CLOSE)
    if near:
        assert cache.bytes < 0.9 * cache.full_bytes
        assert {span for layer in cache.caches for span in layer.spans} == {None, 40}


@pytest.mark.parametrize("rows", [1, 3, 25])
def test_every_step_of_an_eviction_is_exact(rows: int) -> None:
    """Sinks leave the store one after another; a batch is padded so that they do at different steps."""
    model, x = extended(sinks=6), tokens(2, 320)
    mask = padding(x, "left", 9)
    with torch.no_grad():
        wanted = model(x, attention_mask=mask, use_cache=False).logits
    cache = model.make_cache()
    for layer in cache.caches:
        layer.limits, layer.rollback = ba.attention.cache.spans.SpanLimits(least_kept=0, least_freed=0), 2
    pieces = [10, *[rows] * (310 // rows), *([310 % rows] if 310 % rows else [])]
    logits = read(model, x, cache, pieces, mask)
    assert torch.allclose(logits[0, 9:], wanted[0, 9:], atol=CLOSE)
    assert torch.allclose(logits[1], wanted[1], atol=CLOSE)


def test_a_long_text_takes_memory_where_heads_look_far() -> None:
    every = [(layer, head) for layer in range(2) for head in range(2)]
    for near, most in ((every, 0.15), (every[1:], 0.4)):
        model = extended(near=near)
        cache = model.make_cache()
        read(model, tokens(1, 4000), cache, [3000, 1000])
        assert cache.bytes < most * cache.full_bytes


def test_temperatures_of_the_model_are_those_of_the_keys_that_a_head_sees() -> None:
    x = tokens(2, LENGTH)
    model = ba.add_prior(make_model("Llama"), ba.Uniform(4), ba.ScalableSoftmax(4), scale_prior=False)
    ba.extend(model, 40, train_length=100, near=[(0, 1), (1, 0)])
    with torch.no_grad():
        wanted = model(x, use_cache=False).logits
    assert torch.allclose(read(model, x, model.make_cache(), PIECES), wanted, atol=CLOSE)


def test_generation_and_beams_are_those_of_a_cache_of_transformers() -> None:
    model, x = extended(), tokens(2, 400)
    mask = padding(x, "left", 30)
    given = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for more in ({}, {"num_beams": 3}):
        wanted = model.generate(x, **given, **more)
        assert torch.equal(model.generate(x, **given, **more, past_key_values=model.make_cache()), wanted)


def test_tokens_are_taken_back_and_copies_go_on_by_themselves() -> None:
    model, x = extended(), tokens(1, LENGTH)
    cache = model.make_cache(rollback=64)
    wanted = read(model, x, cache, PIECES)
    cache.crop(-50)
    other = copy.deepcopy(cache)
    for each in (cache, other):
        assert torch.allclose(read(model, x[:, -50:], each, [20, 30]), wanted[:, -50:], atol=CLOSE)
    check_refused(lambda: cache.crop(-500), "keys before")


def test_half_precision_errs_no_more_than_without_a_cache() -> None:
    exact, x = extended(), tokens(1, LENGTH)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    with torch.no_grad():
        wanted, plain = exact(x).logits, half(x, use_cache=False).logits.float()
    cached = read(half, x, half.make_cache(), PIECES).float()
    assert (cached - wanted).abs().max() <= 2 * (plain - wanted).abs().max()


def test_what_the_cache_cannot_do_is_refused() -> None:
    x = tokens(1, 60)
    with torch.no_grad():
        sliding = ba.extend(make_model("Mistral", sliding_window=50), 40, train_length=100)
        check_refused(lambda: sliding(x, past_key_values=sliding.make_cache()), "is extended and has a sliding window")
        model = extended()
        plain = ba.add_prior(make_model("Llama"), ba.Uniform(4)).make_cache()
        check_refused(lambda: model(x, past_key_values=plain), "is the cache of another model")
        base = ba.add_prior(make_model("Llama"), ba.Uniform(4))
        check_refused(lambda: base(x, past_key_values=model.make_cache()), "is the cache of another model")
    check_refused(lambda: model(x, past_key_values=model.make_cache()), "use it with torch.no_grad()")
    priors = ba.extend(ba.add_prior(make_model("Llama"), ba.Laplace(4)), 40, train_length=100)
    check_refused(priors.make_cache, "is extended and has a prior besides")
    check_refused(lambda: model.make_cache(full_prompt=True), "full_prompt is for windows")
    kept = ba.LayerCache(ba.Uniform(2))
    k = torch.zeros(1, 2, 3, 4)
    check_refused(lambda: kept.attend_by(lambda _: k, k, k), "attend_by needs a cache with tolerance=0")
