"""The prior-bounded cache under `generate()` of models from transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import bayesattn as ba
from tests.attention.cache.sequences import contents, pickled, saved_and_loaded
from tests.models import cases

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def caches(prior: ba.Prior) -> ba.BayesCache:
    return ba.BayesCache([ba.LayerCache(prior, same_positions=True, content_spread=0.0, rollback=8) for _ in range(2)])


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}],
)
def test_a_uniform_prior_keeps_everything_a_llama_needs(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompt = torch.randint(3, 50, (2, 9))
    prompt[1, :4] = 0
    mask = (prompt != 0).long()
    outputs = []
    for cache in (None, caches(ba.Uniform(4))):
        torch.manual_seed(1)
        outputs.append(
            model.generate(
                prompt, attention_mask=mask, pad_token_id=0, max_new_tokens=20, past_key_values=cache, **settings
            )
        )
    assert torch.equal(*outputs)


def test_a_window_prior_keeps_what_a_sliding_window_model_needs() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=12)).eval()
    prompt = torch.randint(3, 50, (1, 400))
    cache = caches(ba.Window(4, 12))
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), model.generate(prompt, past_key_values=cache, **settings))
    assert cache.get_seq_length() == 429
    assert cache.bytes < 0.3 * cache.full_bytes
    assert str(cache).startswith("layer 0: 429 positions")


def test_the_interface_of_a_cache() -> None:
    cache = caches(ba.Uniform(4))
    k = torch.randn(2, 2, 10, 4)
    for layer in range(2):
        cache.update(k, k, layer)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    assert cache.get_mask_sizes(2, 0) == (9, 0)
    cache.batch_repeat_interleave(2)
    assert cache.caches[0].batch == 4
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(cache.update(k[1:], k[1:], 0)[0][0, :, :7], k[1, :, :7])
    with pytest.raises(ValueError, match="negative number"):
        cache.layers[0].crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0


Model = ba.BamForCausalLM
MODELS = pytest.mark.parametrize("make", [cases.make, cases.make_delayed], ids=["bam", "delayed keys"])


@MODELS
@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled, saved_and_loaded], ids=lambda each: each.__name__)
@torch.no_grad()
def test_a_prompt_is_read_once_and_continued_from_copies(
    make: Callable[[], Model], copy_of: Callable[[ba.BayesCache], ba.BayesCache]
) -> None:
    model, text = make(), cases.tokens(length=300)
    cache = model.make_cache()
    model(text[:, :290], past_key_values=cache)
    wanted = model(text, use_cache=False).logits[:, 290:]
    before = [contents(each) for each in cache.all_caches]
    for _ in range(2):
        logits = model(text[:, 290:], past_key_values=copy_of(cache)).logits
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert [contents(each) for each in cache.all_caches] == before


@MODELS
@pytest.mark.parametrize("positions", [0, 290])
@torch.no_grad()
def test_a_forward_pass_that_fails_in_its_last_layer_changes_no_cache(
    make: Callable[[], Model], positions: int
) -> None:
    model, text = make(), cases.tokens(length=300)
    cache, mask = model.make_cache(), torch.ones_like(text)
    mask[0, :4] = 0
    if positions:
        model(text[:, :positions], attention_mask=mask[:, :positions], past_key_values=cache)
    before = [contents(each) for each in cache.all_caches]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    last: torch.nn.Module = model.model.layers[-1]  # type: ignore[assignment]
    hook = last.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(text[:, positions:], attention_mask=mask, past_key_values=cache)
    assert [contents(each) for each in cache.all_caches] == before
    hook.remove()
    logits = model(text[:, positions:], attention_mask=mask, past_key_values=cache).logits
    wanted = model(text, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[:, -1], wanted[:, -1], atol=1e-4, rtol=1e-4)


def test_a_layer_that_cannot_follow_stops_all_layers() -> None:
    patient, hasty = (
        ba.LayerCache(ba.Window(4, 8), same_positions=True, content_spread=0.0, rollback=rollback)
        for rollback in (90, 3)
    )
    cache = ba.BayesCache([patient, hasty])
    k = torch.randn(2, 2, 400, 4)
    for layer in range(2):
        cache.update(k, k, layer)
    before = [contents(each) for each in cache.caches]
    with pytest.raises(ValueError, match=r"cannot crop to 350 positions: keys before .* rollback=50 or more"):
        cache.crop(-50)
    assert [contents(each) for each in cache.caches] == before
