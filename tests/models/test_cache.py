"""The prior-bounded cache under `generate()` of models from transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import bayesattn as ba

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
