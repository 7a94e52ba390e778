"""Cross layers and delayed keys: against the written-out definition, with caches, documents and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.models.bam.configuration import POSITIONS
from bayesattn.studies.passkey.dense import dense_logits
from tests.models.cases import assert_checkpointing_changes_no_gradient, make, make_delayed, tokens

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
THREE: dict[str, Any] = {"num_hidden_layers": 3, "scalable_softmax": [False, True, True]}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("cross_layers", [2, 3])
@torch.no_grad()
def test_cross_layers_all_read_what_enters_the_first(position: str, cross_layers: int) -> None:
    model, ids = make_delayed(position, cross_layers=cross_layers, **THREE), tokens()
    inner, at = model.model, torch.arange(30)[None].expand(2, -1)
    x, rotary = inner._embed(ids, at)
    for layer in inner.layers[: 3 - cross_layers]:
        x = layer(x, rotary)
    memory = x
    for layer in inner.layers[3 - cross_layers :]:
        x = x + layer.self_attn(layer.input_layernorm(x), layer.input_layernorm(memory), None, rotary)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    whole = model.lm_head(inner.norm(x))
    torch.testing.assert_close(model(ids).logits, whole, **CLOSE)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], **CLOSE)
    torch.testing.assert_close(dense_logits(model, ids[:1]), whole[0, -1], **CLOSE)
    inner.chunk_size = 11
    cache = model.make_cache()
    parts = [ids[:, :23], ids[:, 23:29], ids[:, 29:]]
    read = [model(part, past_key_values=cache).logits for part in parts]
    torch.testing.assert_close(torch.cat(read, 1), whole, **CLOSE)
    fresh = model(ids, use_cache=True, logits_to_keep=1)
    torch.testing.assert_close(fresh.logits, whole[:, -1:], **CLOSE)
    assert [c.length for c in fresh.past_key_values.caches] == [30] * 3
    others = make(position, **THREE)
    others.load_state_dict(model.state_dict())
    assert not torch.allclose(others(ids).logits, whole, atol=1e-2)


@torch.no_grad()
def test_without_delay_and_with_one_cross_layer_it_is_the_published_model() -> None:
    model, plain, ids = make_delayed(), make(), tokens()
    assert model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


@torch.no_grad()
def test_a_delayed_state_is_that_of_a_token_that_has_read_the_next_ones() -> None:
    encoder = make_delayed(key_delay=4).model.delay_encoder
    x, attention = torch.randn(2, 11, 32), encoder.self_attn
    documents = torch.tensor([[0] * 11, [0] * 5 + [1] * 6])
    delayed = encoder.encode(x, documents)
    for sequence, row in ((b, i) for b in range(2) for i in range(11)):
        if row < 4 or documents[sequence, row - 4] != documents[sequence, row]:
            assert not delayed[sequence, row].any()
            continue
        read = encoder.input_layernorm(x[sequence, row - 4 : row + 1])
        q, k, v = (f(read).unflatten(-1, (-1, 8)) for f in (attention.q_proj, attention.k_proj, attention.v_proj))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        logits = torch.einsum("hd,nhd->hn", q[0], k) / 8**0.5 + attention.prior(torch.arange(5))
        weights = (attention.temperature.s[:, None] * logits).softmax(-1)
        state = x[sequence, row - 4] + attention.o_proj(torch.einsum("hn,nhd->hd", weights, v).flatten())
        state = state + encoder.mlp(encoder.post_attention_layernorm(state))
        torch.testing.assert_close(delayed[sequence, row], state, atol=1e-5, rtol=1e-5)
    assert not torch.isfinite(attention.prior(torch.tensor(5))).any()


@pytest.mark.parametrize("cross_layers", [1, 2])
@pytest.mark.parametrize("delayed_heads", [[1], None])
@torch.no_grad()
def test_keys_and_values_of_delayed_heads_are_made_of_delayed_states(
    cross_layers: int, delayed_heads: list[int] | None
) -> None:
    model = make_delayed(key_delay=6, delayed_heads=delayed_heads, cross_layers=cross_layers, **THREE)
    ids = tokens()
    inner, x = model.model, model.get_input_embeddings()(ids)
    for layer in inner.layers[: 3 - cross_layers]:
        x = layer(x)
    memory, delayed = x, inner.delay_encoder.encode(x)
    for layer in inner.layers[3 - cross_layers :]:
        attention, (now, keys, late) = layer.self_attn, [layer.input_layernorm(y) for y in (x, memory, delayed)]
        sources = [late if head in (delayed_heads or [0, 1]) else keys for head in range(2)]
        q = attention.project_queries(now)
        k, v = (
            torch.stack([projection(s)[..., h * 8 : h * 8 + 8] for h, s in enumerate(sources)], 1)
            for projection in (attention.k_proj, attention.v_proj)
        )
        mixed = ba.bayesian_attention(q, k, v, attention.prior, query_scale=attention.temperature)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    whole = model.lm_head(inner.norm(x))
    torch.testing.assert_close(model(ids).logits, whole, **CLOSE)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], **CLOSE)
    torch.testing.assert_close(dense_logits(model, ids[:1]), whole[0, -1], **CLOSE)
    # In chunks shorter than the delay and longer, token by token, cropped, and for other sequences.
    for inner.chunk_size in (4, 11):
        cache = model.make_cache()
        read = [model(part, past_key_values=cache).logits for part in ids.split([23, 5, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(read, 1), whole, **CLOSE)
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = model(ids.flip(0)[:, 23:], past_key_values=cache).logits
        torch.testing.assert_close(again, whole.flip(0)[:, 23:], **CLOSE)
    # A change is seen by no position before it.
    changed = ids.clone()
    changed[:, 20] = 3 + (ids[:, 20] - 2) % 37
    different = (model(changed).logits - whole).abs().amax((0, 2)) > 1e-4
    assert different.tolist() == [False] * 20 + [True] * 10


@torch.no_grad()
def test_delayed_keys_read_long_texts_padded_batches_and_packed_documents() -> None:
    model = make_delayed(key_delay=6, delayed_heads=[0])
    ids = tokens(length=700)
    whole, cache = model(ids).logits, model.make_cache()
    read = [model(part, past_key_values=cache).logits for part in ids.split(300, 1)]
    torch.testing.assert_close(torch.cat(read, 1), whole, **CLOSE)
    assert cache.states.first > 500  # of the hidden states, only those that the next tokens need
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    for past in (None, model.make_cache()):
        padded = model(ids, attention_mask=mask, past_key_values=past).logits
        torch.testing.assert_close(padded[:1, 8:], model(ids[:1, 8:]).logits, **CLOSE)
        torch.testing.assert_close(padded[1:], whole[1:], **CLOSE)
    packed = model(ids[:, :40], document_ids=(torch.arange(40) // 15).expand(2, -1)).logits
    for first in (0, 15, 30):
        alone = model(ids[:, first : min(40, first + 15)]).logits
        torch.testing.assert_close(packed[:, first : first + 15], alone, **CLOSE)
    cached, uncached = (
        model.generate(ids[:, :30], max_new_tokens=8, do_sample=False, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)


@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    model, ids = make_delayed(key_delay=6, cross_layers=2), tokens()
    model.save_pretrained(tmp_path)
    for load in (ba.DelayedKeysForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, ba.load_model):
        loaded = load(str(tmp_path))
        assert isinstance(loaded, ba.DelayedKeysForCausalLM)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    longer = ba.DelayedKeysForCausalLM.from_pretrained(tmp_path, key_delay=10).model.delay_encoder
    assert torch.isfinite(longer.prior(torch.arange(12))).sum(-1).tolist() == [11] * 4
    with pytest.raises(ValueError, match=r"is a delayed_keys model and not a bam model; load it with bayesattn\.load_"):
        ba.BamForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_cache_of_another_model_is_an_error() -> None:
    model, ids = make_delayed(key_delay=6), tokens()
    with pytest.raises(TypeError, match=r"past_key_values is a BayesCache; .* make one with"):
        model(ids, past_key_values=make().make_cache())
    with pytest.raises(TypeError, match=r"past_key_values is a DelayedKeysCache; .* make one with"):
        make()(ids, past_key_values=model.make_cache())
    with pytest.raises(ValueError, match="past_key_values has 3 layers and the model 2; make one with"):
        model(ids, past_key_values=make_delayed(key_delay=6, **THREE).make_cache())
    cache = model.make_cache()
    model(ids, past_key_values=cache)
    assert cache.full_bytes == 2 * 30 * 2 * (2 * 2 * 8) * 4  # keys and values alone
    assert cache.bytes > sum(layer.bytes for layer in cache.caches)
    cache.states.crop(20)  # as if a step had been interrupted
    with pytest.raises(ValueError, match="position 30 and the cache has 20"):
        model(ids[:, :1], past_key_values=cache)


def test_the_cache_of_delayed_states_is_on_the_device_of_the_model() -> None:
    assert make_delayed(key_delay=6).to("meta").make_cache().states.prior.width.device.type == "meta"


@torch.no_grad()
def test_document_ids_may_be_small_integers() -> None:
    model, ids = make_delayed(key_delay=6), tokens()
    documents = (torch.arange(30) // 10).expand(2, -1)
    torch.testing.assert_close(
        model(ids, document_ids=documents.byte()).logits, model(ids, document_ids=documents).logits
    )


@pytest.mark.parametrize("settings", [{"cross_layers": 2}, {"key_delay": 5}])
def test_gradient_checkpointing_changes_no_gradient(settings: dict[str, int]) -> None:
    assert_checkpointing_changes_no_gradient(make_delayed(**settings))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cross_layers": 3}, r"cross_layers is 3; 1 to 2 \(all layers\) are allowed"),
        ({"cross_layers": 0}, r"cross_layers is 0; 1 to 2 \(all layers\) are allowed"),
        ({"key_delay": -1}, "key_delay is -1; a number of tokens is needed"),
        ({"key_delay": 4, "position": "rope"}, "key_delay is 4 and position 'rope'; bam is needed"),
        ({"key_delay": 4, "delayed_heads": [2]}, r"delayed_heads is \[2\] and key_delay 4; different .* from 0 to 1"),
        ({"key_delay": 4, "delayed_heads": [0, 0]}, r"delayed_heads is \[0, 0\] and key_delay 4; different"),
        ({"key_delay": 4, "delayed_heads": []}, r"delayed_heads is \[\] and key_delay 4; different"),
        (
            {"delayed_heads": [0]},
            r"delayed_heads is \[0\] and key_delay 0; different .* with a key_delay of",
        ),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_delayed(**settings)
