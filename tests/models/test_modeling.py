"""The model under transformers: every position setting, caches, generation, packing, saving."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import bayesattn as ba
from bayesattn.evaluation.dense import dense_logits
from bayesattn.models import modeling
from bayesattn.models.configuration import OTHERS, PRESETS, PRIORS

positions = pytest.mark.parametrize("position", PRIORS + OTHERS)


def make(position: str = "bam", **changes: Any) -> ba.BamForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "position": position, "window": 9, "prior_init": "spread", "prior_epsilon": 1.0, "initializer_range": 0.3,
        "scalable_softmax": [False, [True, False, True, False]], "learned_temperature": True, "eos_token_id": None,
    }  # fmt: skip
    return ba.BamForCausalLM(ba.BamConfig(**{**settings, **changes})).eval()


def tokens(batch: int = 2, length: int = 30, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


@positions
@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_a_cache_changes_nothing(position: str, qk_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "CHUNK", 11)
    model, ids = make(position, qk_norm=qk_norm), tokens()
    whole = model(ids).logits
    cache = model.make_cache()
    first = model(ids[:, :25], past_key_values=cache).logits
    rest = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(25, 30)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-4, rtol=1e-4)
    fresh = model(ids, use_cache=True, logits_to_keep=3)
    torch.testing.assert_close(fresh.logits, whole[:, -3:], atol=1e-4, rtol=1e-4)
    assert fresh.past_key_values.get_seq_length() == 30


@positions
@pytest.mark.parametrize("reading", [2, 3])
@torch.no_grad()
def test_reading_layers_all_look_at_what_enters_the_first(
    position: str, reading: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_hidden_layers": 3, "scalable_softmax": [False, True, True]}
    model, ids = make(position, reading_layers=reading, **settings), tokens()
    inner, at = model.model, torch.arange(30)[None].expand(2, -1)
    x, rotary = inner._embed(ids, at)
    for layer in inner.layers[: 3 - reading]:
        x = layer(x, rotary)
    memory = x
    for layer in inner.layers[3 - reading :]:
        attended = layer.self_attn(layer.input_layernorm(x), layer.input_layernorm(memory), None, rotary)
        x = x + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    whole = model.lm_head(inner.norm(x))
    torch.testing.assert_close(model(ids).logits, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dense_logits(model, ids[:1]), whole[0, -1], atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(modeling, "CHUNK", 11)
    cache = model.make_cache()
    parts = [ids[:, :23], ids[:, 23:29], ids[:, 29:]]
    read = [model(part, past_key_values=cache).logits for part in parts]
    torch.testing.assert_close(torch.cat(read, 1), whole, atol=1e-4, rtol=1e-4)
    fresh = model(ids, use_cache=True, logits_to_keep=1)
    torch.testing.assert_close(fresh.logits, whole[:, -1:], atol=1e-4, rtol=1e-4)
    assert [c.length for c in fresh.past_key_values.caches] == [30] * 3
    others = make(position, **settings)
    others.load_state_dict(model.state_dict())
    assert not torch.allclose(others(ids).logits, whole, atol=1e-2)


@torch.no_grad()
def test_hindsight_is_the_state_of_a_token_that_has_seen_the_next_ones() -> None:
    look = make(hindsight=4).model.hindsight
    x, attention = torch.randn(2, 11, 32), look.self_attn
    documents = torch.tensor([[0] * 11, [0] * 5 + [1] * 6])
    found = look.look_back(x, documents)
    for sequence, row in ((b, i) for b in range(2) for i in range(11)):
        if row < 4 or documents[sequence, row - 4] != documents[sequence, row]:
            assert not found[sequence, row].any()
            continue
        seen = look.input_layernorm(x[sequence, row - 4 : row + 1])
        q, k, v = (f(seen).unflatten(-1, (-1, 8)) for f in (attention.q_proj, attention.k_proj, attention.v_proj))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        logits = torch.einsum("hd,nhd->hn", q[0], k) / 8**0.5 + attention.prior(torch.arange(5))
        weights = (attention.temperature.s[:, None] * logits).softmax(-1)
        state = x[sequence, row - 4] + attention.o_proj(torch.einsum("hn,nhd->hd", weights, v).flatten())
        state = state + look.mlp(look.post_attention_layernorm(state))
        torch.testing.assert_close(found[sequence, row], state, atol=1e-5, rtol=1e-5)
    assert not torch.isfinite(attention.prior(torch.tensor(5))).any()


@pytest.mark.parametrize("reading", [1, 2])
@pytest.mark.parametrize("chosen", [[1], None])
@torch.no_grad()
def test_keys_and_values_are_made_in_hindsight(
    reading: int, chosen: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_hidden_layers": 3, "scalable_softmax": [False, True, True], "reading_layers": reading}
    model, ids = make(hindsight=6, hindsight_heads=chosen, **settings), tokens()
    inner, x = model.model, model.get_input_embeddings()(ids)
    for layer in inner.layers[: 3 - reading]:
        x = layer(x)
    memory, later = x, inner.hindsight.look_back(x)
    for layer in inner.layers[3 - reading :]:
        attention, seen = layer.self_attn, [layer.input_layernorm(y) for y in (x, memory, later)]
        q, k, v = attention.project(*seen, None)
        for made, projection in ((k, attention.k_proj), (v, attention.v_proj)):
            for head in range(2):
                source = seen[2] if head in (chosen or [0, 1]) else seen[1]
                torch.testing.assert_close(made[:, head], projection(source)[..., head * 8 : head * 8 + 8])
        r = attention._temperatures(q, k, None)
        mixed = ba.bayesian_attention(q, k, v, attention.prior, query_scale=r)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    whole = model.lm_head(inner.norm(x))
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(model(ids).logits, whole, **close)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], **close)
    torch.testing.assert_close(dense_logits(model, ids[:1]), whole[0, -1], **close)
    # In chunks shorter than the hindsight and longer, token by token, taken back, and for other sequences.
    for chunk in (4, 11):
        monkeypatch.setattr(modeling, "CHUNK", chunk)
        cache = model.make_cache()
        read = [model(part, past_key_values=cache).logits for part in ids.split([23, 5, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(read, 1), whole, **close)
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = model(ids.flip(0)[:, 23:], past_key_values=cache).logits
        torch.testing.assert_close(again, whole.flip(0)[:, 23:], **close)
    # A change is seen by nobody before it.
    changed = ids.clone()
    changed[:, 20] = 3 + (ids[:, 20] - 2) % 37
    different = (model(changed).logits - whole).abs().amax((0, 2)) > 1e-4
    assert different.tolist() == [False] * 20 + [True] * 10


@torch.no_grad()
def test_hindsight_reads_long_texts_padded_batches_and_packed_documents() -> None:
    model = make(hindsight=6, hindsight_heads=[0])
    ids = tokens(length=700)
    whole, cache = model(ids).logits, model.make_cache()
    read = [model(part, past_key_values=cache).logits for part in ids.split(300, 1)]
    torch.testing.assert_close(torch.cat(read, 1), whole, atol=1e-4, rtol=1e-4)
    assert cache.hindsight.first > 500  # of the states, only those that the next tokens need
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    for past in (None, model.make_cache()):
        padded = model(ids, attention_mask=mask, past_key_values=past).logits
        torch.testing.assert_close(padded[:1, 8:], model(ids[:1, 8:]).logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(padded[1:], whole[1:], atol=1e-4, rtol=1e-4)
    packed = model(ids[:, :40], document_ids=(torch.arange(40) // 15).expand(2, -1)).logits
    for first in (0, 15, 30):
        alone = model(ids[:, first : min(40, first + 15)]).logits
        torch.testing.assert_close(packed[:, first : first + 15], alone, atol=1e-4, rtol=1e-4)
    said = model.generate(ids[:, :30], max_new_tokens=8, do_sample=False, num_beams=3)
    uncached = model.generate(ids[:, :30], max_new_tokens=8, do_sample=False, num_beams=3, use_cache=False)
    assert torch.equal(said, uncached)


@torch.no_grad()
def test_hindsight_is_saved_with_the_model(tmp_path: Path) -> None:
    model, ids = make(hindsight=6), tokens()
    model.save_pretrained(tmp_path)
    assert torch.equal(ba.BamForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    longer = ba.BamForCausalLM.from_pretrained(tmp_path, hindsight=10).model.hindsight
    assert torch.isfinite(longer.prior(torch.arange(12))).sum(-1).tolist() == [11] * 4


@torch.no_grad()
def test_a_cache_fits_its_model() -> None:
    model, ids = make(hindsight=6), tokens()
    with pytest.raises(ValueError, match="of a model with other hindsight; make one with"):
        model(ids, past_key_values=make().make_cache())
    with pytest.raises(ValueError, match="of a model with other hindsight; make one with"):
        make()(ids, past_key_values=model.make_cache())
    with pytest.raises(ValueError, match="there are 2 layers and 3 caches"):
        model(ids, past_key_values=make(hindsight=6, num_hidden_layers=3, scalable_softmax=True).make_cache())
    cache = model.make_cache()
    model(ids, past_key_values=cache)
    assert cache.full_bytes == 2 * 30 * 2 * (2 * 2 * 8) * 4  # keys and values alone
    assert cache.bytes > sum(layer.bytes for layer in cache.caches)
    cache.hindsight.crop(20)  # as if a step had been broken off
    with pytest.raises(ValueError, match="said to start at position 30 and the cache has 20"):
        model(ids[:, :1], past_key_values=cache)


def test_a_cache_of_hindsight_is_where_the_model_is() -> None:
    assert make(hindsight=6).to("meta").make_cache().hindsight.prior.width.device.type == "meta"


@torch.no_grad()
def test_documents_may_be_numbered_in_small_numbers() -> None:
    model, ids = make(hindsight=6), tokens()
    documents = (torch.arange(30) // 10).expand(2, -1)
    torch.testing.assert_close(
        model(ids, document_ids=documents.byte()).logits, model(ids, document_ids=documents).logits
    )


@torch.no_grad()
def test_it_answers_as_other_models_of_transformers_do() -> None:
    model, ids = make(), tokens()
    plain = model(ids)
    assert plain.past_key_values is None
    assert plain.hidden_states is None
    for use_cache in (False, True):  # more positions than there are, and some by their number
        assert torch.allclose(model(ids, use_cache=use_cache, logits_to_keep=99).logits, plain.logits, atol=1e-4)
        chosen = model(ids, use_cache=use_cache, logits_to_keep=torch.tensor([3, 29])).logits
        assert torch.allclose(chosen, plain.logits[:, [3, 29]], atol=1e-4)
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[1], plain.logits)
    states = model(ids, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 30, 32)] * 3
    assert torch.equal(states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model.lm_head(states[-1]), plain.logits)
    assert make(use_cache=True)(ids).past_key_values.get_seq_length() == 30


@positions
@torch.no_grad()
def test_left_padding_and_packing_change_nothing(position: str) -> None:
    model, ids = make(position), tokens(length=20)
    alone = [model(ids[:1, 8:]).logits, model(ids[1:]).logits]
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    for past in (None, model.make_cache()):
        padded = model(ids, attention_mask=mask, past_key_values=past).logits
        torch.testing.assert_close(padded[:1, 8:], alone[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(padded[1:], alone[1], atol=1e-4, rtol=1e-4)
    packed = torch.cat([ids[:1, 8:], ids[1:]], 1)
    documents = torch.tensor([[0] * 12 + [1] * 20])
    places = torch.tensor([[*range(12), *range(20)]])
    ones = torch.ones_like(packed)
    for how in (
        {"document_ids": documents},
        {"position_ids": places},
        {"position_ids": places, "attention_mask": ones},
        {"document_ids": documents, "attention_mask": ones},
    ):
        torch.testing.assert_close(model(packed, **how).logits, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


def test_generate_is_what_one_gets_without_a_cache() -> None:
    model, ids = make(), tokens()
    longer = ids
    for _ in range(6):
        longer = torch.cat([longer, model(longer).logits[:, -1].argmax(-1, keepdim=True)], 1)
    settings = {"max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, do_sample=False, **settings), longer)
    assert torch.equal(model.generate(ids, do_sample=False, use_cache=False, **settings), longer)
    beams = [model.generate(ids, num_beams=3, do_sample=False, use_cache=c, **settings) for c in (True, False)]
    assert torch.equal(*beams)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        drawn.append(model.generate(ids, do_sample=True, use_cache=use_cache, **settings))
    assert torch.equal(*drawn)


def test_generate_with_left_padding_is_generate_without() -> None:
    model, ids = make(), tokens(length=20)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    settings = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    both = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(both[:1, 8:], model.generate(ids[:1, 8:], **settings))
    assert torch.equal(both[1:], model.generate(ids[1:], **settings))


@positions
def test_saved_and_loaded_it_is_the_same(position: str, tmp_path: Path) -> None:
    model, ids = make(position), tokens()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    for loaded in (ba.BamForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).position == position


def test_a_setting_changed_on_loading_is_as_changed(tmp_path: Path) -> None:
    ids = tokens()
    for position, changes in (("bam", {"scalable_softmax": False}), ("window", {"window": 2})):
        model = make(position, learned_temperature=True)
        model.save_pretrained(tmp_path / position)
        same, other = (ba.BamForCausalLM.from_pretrained(tmp_path / position, **changed) for changed in ({}, changes))
        torch.testing.assert_close(same(ids).logits, model(ids).logits)
        made = make(position, learned_temperature=True, **changes)
        settings = {name: value for name, value in made.state_dict().items() if not value.is_floating_point()}
        made.load_state_dict({**model.state_dict(), **settings})
        torch.testing.assert_close(other(ids).logits, made(ids).logits)
        assert not torch.allclose(other(ids).logits, same(ids).logits)


@pytest.mark.parametrize("shared", ["prior", "embeddings"])
def test_what_is_shared_stays_shared(shared: str, tmp_path: Path) -> None:
    model = make(share_prior=shared == "prior", tie_word_embeddings=shared == "embeddings")
    model.save_pretrained(tmp_path)
    loaded = ba.BamForCausalLM.from_pretrained(tmp_path)
    layers = loaded.model.layers
    assert (layers[0].self_attn.prior is layers[1].self_attn.prior) == (shared == "prior")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (shared == "embeddings")
    ids = tokens()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_the_loss_is_the_mean_over_what_is_to_be_learned() -> None:
    model, ids = make(), tokens()
    labels = ids.clone()
    labels[:, :10] = -100
    out = model(ids, labels=labels)
    by_hand = nn.functional.cross_entropy(out.logits[:, 9:-1].flatten(0, 1), ids[:, 10:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    weights = torch.zeros(ids.shape)
    weights[:, 20] = 3.0
    by_hand = nn.functional.cross_entropy(out.logits[:, 19], ids[:, 20])
    torch.testing.assert_close(model(ids, labels=labels, loss_weights=weights).loss, by_hand)


@pytest.mark.parametrize(("reading", "hindsight"), [(1, 0), (2, 0), (1, 5)])
def test_gradient_checkpointing_changes_no_gradient(reading: int, hindsight: int) -> None:
    model, ids = make(reading_layers=reading, hindsight=hindsight), tokens()
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_temperatures_are_shaken_in_training_only() -> None:
    model, ids = make(temperature_jitter=[0.5, 1.5]), tokens()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@positions
@pytest.mark.parametrize("scale_prior", [True, False])
@torch.no_grad()
def test_in_a_crowd_the_last_quarter_sees_other_sequences_at_the_same_distances(
    position: str, scale_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(position, crowd=2, scale_prior=scale_prior)
    attention, x = model.model.layers[1].self_attn, torch.randn(3, 10, 32)
    rotary = None if position != "rope" else model.model.rotary_emb(x, torch.arange(10)[None].expand(3, -1))
    two = torch.tensor([0] * 8 + [1] * 2).expand(3, -1)
    monkeypatch.setattr(torch, "randint", lambda most, _: torch.tensor(most - 1))
    q, k, v = attention.project(x, x, None, rotary)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    for documents in (None, two):
        model.eval()
        alone = attention(x, x, None, rotary, documents)
        model.train()
        found = attention(x, x, None, rotary, documents)
        expected = torch.zeros(3, 4, 10, 8)
        for sequence in range(3):
            for row in range(10):
                first = 8 if documents is not None and row >= 8 else 0
                prior = attention.prior(row - torch.arange(first, row + 1))
                for head in range(4):
                    # Two stand together, and the third alone.
                    crowd = range(2) if sequence < 2 and row >= 7 and head % 2 == 0 else [sequence]
                    logits = torch.stack([k[c, head, first : row + 1] @ q[sequence, head, row] for c in crowd]) / 8**0.5
                    r = attention.temperature.s[head] * (math.log(logits.numel()) if head % 2 == 0 else 1.0)
                    logits = r * (logits + prior[head]) if scale_prior else r * logits + prior[head]
                    values = torch.cat([v[c, head, first : row + 1] for c in crowd])
                    expected[sequence, head, row] = logits.flatten().softmax(0) @ values
        expected = attention.o_proj(expected.transpose(1, 2).flatten(2))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[:, :7], alone[:, :7], atol=1e-5, rtol=1e-5)
    last = attention(x[:, 6:], x, None, rotary)  # a quarter of four rows is the last
    torch.testing.assert_close(last[:, :3], attention.eval()(x, x, None, rotary)[:, 6:9], atol=1e-5, rtol=1e-5)


@positions
def test_in_a_crowd_all_gradients_are_numbers(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(position, crowd=3).train(), tokens(4)
    monkeypatch.setattr(torch, "randint", lambda most, *_: torch.tensor(most - 1))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_in_a_crowd_nobody_sees_what_comes_after() -> None:
    model, ids = make(crowd=3, num_hidden_layers=3, scalable_softmax=True).train(), tokens(batch=4)
    changed = ids.clone()
    changed[0, -1] = 3 + (ids[0, -1] - 2) % 37
    for seed in range(5):
        torch.manual_seed(seed)
        before = model(ids).logits[:, :-1]
        torch.manual_seed(seed)
        torch.testing.assert_close(model(changed).logits[:, :-1], before)
    with pytest.raises(ValueError, match="crowd and padding do not go together"):
        model(ids, attention_mask=(torch.arange(30) < 29).long().expand(4, -1))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
    ],
    ids=["PI", "NTK", "YaRN"],
)
@torch.no_grad()
def test_rope_can_be_stretched_at_inference(
    scaling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make("rope", training_length=16), tokens()
    model.save_pretrained(tmp_path)
    rope = {"rope_theta": 10_000.0, "original_max_position_embeddings": 16, **scaling}
    stretched = ba.BamForCausalLM.from_pretrained(tmp_path, rope_parameters=rope)
    assert not torch.allclose(stretched(ids).logits, model(ids).logits)
    monkeypatch.setattr(modeling, "CHUNK", 11)
    whole = stretched(ids).logits
    torch.testing.assert_close(stretched(ids, use_cache=True).logits, whole, atol=1e-4, rtol=1e-4)
    shorter = stretched(ids[:, :20]).logits  # after a longer text as after none
    fresh = ba.BamForCausalLM.from_pretrained(tmp_path, rope_parameters=rope)
    torch.testing.assert_close(shorter, fresh(ids[:, :20]).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "millions"), [("l6", 49), ("l8", 97), ("l12", 121), ("l15", 275), ("l18", 525), ("l24", 1141)]
)
def test_the_papers_sizes(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = ba.BamForCausalLM(ba.BamConfig.preset(name))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == pytest.approx(millions, abs=1)
    if name == "l12":
        priors = [m for m in model.modules() if isinstance(m, ba.Prior)]
        assert sum(p.numel() for m in priors for p in m.parameters()) == 384


def test_wrong_settings_and_calls_get_one_sentence() -> None:
    with pytest.raises(ValueError, match="position is 'nowhere'; allowed are bam, alibi"):
        make("nowhere")
    with pytest.raises(ValueError, match="4 heads and 3 key/value heads"):
        make(num_key_value_heads=3)
    with pytest.raises(ValueError, match="reading_layers is 3; 1 to 2, all layers, are allowed"):
        make(reading_layers=3)
    with pytest.raises(ValueError, match="hindsight is -1; a number of tokens is needed"):
        make(hindsight=-1)
    with pytest.raises(ValueError, match="hindsight is 4 and position 'rope'; it is for bam alone"):
        make("rope", hindsight=4)
    for heads in ([2], [0, 0], []):
        with pytest.raises(ValueError, match=r"hindsight_heads is .* and hindsight 4; different ones of .* 0 to 1"):
            make(hindsight=4, hindsight_heads=heads)
    with pytest.raises(ValueError, match=r"hindsight_heads is \[0\] and hindsight 0"):
        make(hindsight_heads=[0])
    with pytest.raises(ValueError, match="crowd is -1; a number of other sequences is needed"):
        make(crowd=-1)
    with pytest.raises(ValueError, match="crowd is 1 and no head has the length temperature"):
        make(crowd=1, scalable_softmax=False)
    with pytest.raises(ValueError, match="hidden_size 30 does not divide by 4 heads"):
        make(hidden_size=30)
    with pytest.raises(ValueError, match=r"prior_init must be \[beta, scale\] for each of 4 heads"):
        make(prior_init=[[[1.0, 2.0]]])
    with pytest.raises(ValueError, match="scalable_softmax must be true, false"):
        make(scalable_softmax=[True])
    for jitter in ([1.5, 0.5], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="two positive factors"):
            make(temperature_jitter=jitter)
    with pytest.raises(ValueError, match="window has 2 numbers and the model 4 heads"):
        make("window", window=[16, 32])
    with pytest.raises(ValueError, match="initializer_range is -1; a positive number is needed"):
        make(initializer_range=-1)
    with pytest.raises(ValueError, match="prior_init has a beta that is no number"):
        make(prior_init=[[[float("nan"), 1.0]] * 4] * 2)
    with pytest.raises(ValueError, match="4 heads in the one prior that layers share"):
        make(prior_init=[[[1.0, 1.0]] * 4] * 2, share_prior=True)
    with pytest.raises(ValueError, match="model has no setting 'positon'; did you mean 'position'"):
        ba.BamConfig.preset("tiny", positon="rope")
    hole = torch.ones(2, 30, dtype=torch.long)
    hole[0, 5:8] = 0
    with pytest.raises(ValueError, match="attention_mask has zeros between ones"):
        make()(torch.full((2, 30), 3), attention_mask=hole)
    with pytest.raises(ValueError, match="there is no preset 'huge'; there are tiny"):
        ba.BamConfig.preset("huge")
    assert "tiny" in PRESETS
    model, ids = make(), tokens()
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    with pytest.raises(ValueError, match="padding must be on the left"):
        model(ids, attention_mask=mask, past_key_values=model.make_cache())
    with pytest.raises(ValueError, match="packed documents and a cache do not go together"):
        model(ids, document_ids=torch.zeros_like(ids), use_cache=True)
    packed = torch.arange(30).remainder(15).expand(2, -1)
    with pytest.raises(ValueError, match="packed documents and a cache do not go together"):
        model(ids, position_ids=packed, use_cache=True)
    begun = model(ids, use_cache=True).past_key_values
    later = torch.ones(2, 34, dtype=torch.long)
    later[0, 30] = 0
    with pytest.raises(ValueError, match="zeros among tokens that continue a text"):
        model(ids[:, :4], attention_mask=later, past_key_values=begun)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model()
    with pytest.raises(TypeError, match=r"make one with model\.make_cache"):
        model(ids, past_key_values=object())
    with pytest.raises(ValueError, match="a cache carries no gradients; train with use_cache=False"):
        make().train()(ids, labels=ids, use_cache=True)
    with pytest.raises(ValueError, match="attention weights are never written out"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="states between layers are not kept with a cache"):
        model(ids, output_hidden_states=True, use_cache=True)
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)


def test_a_program_that_does_not_know_the_package_loads_a_saved_model(tmp_path: Path) -> None:
    ba.BamForCausalLM(ba.BamConfig(hidden_size=16, num_attention_heads=2)).save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoModelForCausalLM; assert 'bayesattn' not in sys.modules; "
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True); "
        "print(type(model).__module__, model.config.hidden_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.stdout.split() == ["bayesattn.models.modeling", "16"], done.stderr
