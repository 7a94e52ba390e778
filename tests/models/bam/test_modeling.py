"""The model under transformers: every position setting, caches, generation, packing, saving."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import bayesattn as ba
from bayesattn.models.bam.configuration import POSITIONS
from bayesattn.models.bam.modeling import published_sinusoids
from tests.models.cases import assert_checkpointing_changes_no_gradient, make, tokens

TURNS = (torch.sin, torch.cos) * 3
positions = pytest.mark.parametrize("position", POSITIONS)


@positions
@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_a_cache_changes_nothing(position: str, qk_norm: bool) -> None:
    model, ids = make(position, qk_norm=qk_norm), tokens()
    model.model.chunk_size = 11
    whole = model(ids).logits
    cache = model.make_cache()
    first = model(ids[:, :25], past_key_values=cache).logits
    rest = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(25, 30)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-4, rtol=1e-4)
    fresh = model(ids, use_cache=True, logits_to_keep=3)
    torch.testing.assert_close(fresh.logits, whole[:, -3:], atol=1e-4, rtol=1e-4)
    assert fresh.past_key_values.get_seq_length() == 30


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


def test_gradient_checkpointing_changes_no_gradient() -> None:
    assert_checkpointing_changes_no_gradient(make())


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
def test_rope_can_be_scaled_at_inference(scaling: dict[str, Any], tmp_path: Path) -> None:
    model, ids = make("rope", training_length=16), tokens()
    model.save_pretrained(tmp_path)
    rope = {"rope_theta": 10_000.0, "original_max_position_embeddings": 16, **scaling}
    scaled = ba.BamForCausalLM.from_pretrained(tmp_path, rope_parameters=rope)
    assert not torch.allclose(scaled(ids).logits, model(ids).logits)
    scaled.model.chunk_size = 11
    whole = scaled(ids).logits
    torch.testing.assert_close(scaled(ids, use_cache=True).logits, whole, atol=1e-4, rtol=1e-4)
    shorter = scaled(ids[:, :20]).logits  # after a longer text as after none
    fresh = ba.BamForCausalLM.from_pretrained(tmp_path, rope_parameters=rope)
    torch.testing.assert_close(shorter, fresh(ids[:, :20]).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters", "heads"),
    [
        ("l6", 49_290_016, 16), ("l8", 97_531_008, 16), ("l12", 121_130_304, 16), ("l15", 274_599_864, 24),
        ("l18", 525_395_136, 32), ("l24", 1_140_955_648, 64),
    ],
)  # fmt: skip
def test_the_papers_sizes(name: str, parameters: int, heads: int) -> None:
    config = ba.BamConfig.preset(name)
    assert (config.num_attention_heads, config.rms_norm_eps) == (heads, 1e-5)
    with torch.device("meta"):
        model = ba.BamForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    if name == "l12":
        priors = [m for m in model.modules() if isinstance(m, ba.Prior)]
        assert sum(p.numel() for m in priors for p in m.parameters()) == 384


@torch.no_grad()
def test_the_papers_weights_are_those_of_pytorch() -> None:
    model = ba.BamForCausalLM(ba.BamConfig.preset("l6", num_hidden_layers=1, vocab_size=4096))
    assert model.get_input_embeddings().weight.std() == pytest.approx(1, abs=0.01)
    for matrix in (model.lm_head, model.model.layers[0].mlp.down_proj):
        bound = matrix.in_features**-0.5
        assert 0.99 * bound < matrix.weight.abs().max() <= bound
        assert matrix.weight.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert model.model.layers[0].input_layernorm.weight.eq(1).all()


def test_the_padding_token_learns_as_any_other() -> None:
    model = ba.BamForCausalLM(ba.BamConfig(hidden_size=32, vocab_size=7, pad_token_id=3))
    ids = torch.tensor([[3, 1, 3, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    rows = model.get_input_embeddings().weight
    assert rows.grad is not None
    assert rows[3].any()
    assert rows.grad[3].any()


@pytest.mark.parametrize("init", ["linear", "sampled"])
def test_initial_priors_of_the_authors_code_are_saved_with_the_model(init: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ba.BamForCausalLM(ba.BamConfig(prior_init=init, hidden_size=32, vocab_size=20))
    model.save_pretrained(tmp_path)
    again = ba.BamForCausalLM.from_pretrained(tmp_path)
    assert model.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    first, second = (layer.self_attn.prior.theta_beta for layer in model.model.layers[:2])
    assert torch.equal(first, second) == (init == "linear")


def test_the_papers_encodings_have_its_frequencies() -> None:
    rotary = ba.BamForCausalLM(ba.BamConfig.preset("l6", position="rope", num_hidden_layers=1)).model.rotary_emb
    assert rotary is not None
    torch.testing.assert_close(rotary.inv_freq, 500_000.0 ** (-torch.arange(0, 32, 2) / 32))
    table = published_sinusoids(torch.tensor([0, 3]), 5)
    angle = 3 * 10_000.0 ** (-torch.arange(5) / 5)
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(table[1], torch.stack([f(a) for f, a in zip(TURNS, angle, strict=False)]))


def zeros_at(*places: int, length: int = 30) -> torch.Tensor:
    """An attention mask with padding at these places of the first sequence."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, list(places)] = 0
    return mask


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"attention_mask": zeros_at(5, 6, 7)}, "attention_mask has zeros between ones"),
        ({"attention_mask": zeros_at(27, 28, 29), "use_cache": True}, "padding must be on the left"),
        (
            {"attention_mask": zeros_at(29), "position_ids": (torch.arange(30) % 29).expand(2, -1), "use_cache": True},
            "padding must be on the left",
        ),
        ({"document_ids": torch.zeros(2, 30).long(), "use_cache": True}, "packed documents and a cache do not go"),
        (
            {"position_ids": torch.arange(30).remainder(15).expand(2, -1), "use_cache": True},
            "packed documents and a cache do not go together",
        ),
        ({"input_ids": None}, "give either input_ids or inputs_embeds"),
        ({"past_key_values": object()}, r"make one with model\.make_cache"),
        ({"past_key_values": DynamicCache()}, r"is a DynamicCache; .* make one with model\.make_cache"),
        ({"output_attentions": True}, "attention weights are never written out"),
    ],
)
def test_calls_that_cannot_be_answered_get_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()(**{"input_ids": tokens(), **arguments})


def test_padding_among_tokens_that_continue_a_text_is_an_error() -> None:
    model, ids = make(), tokens()
    begun = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="zeros among tokens that continue a text"):
        model(ids[:, :4], attention_mask=zeros_at(30, length=34), past_key_values=begun)


def test_a_cache_is_not_for_training() -> None:
    with pytest.raises(ValueError, match="a cache carries no gradients; train with use_cache=False"):
        make().train()(tokens(), labels=tokens(), use_cache=True)


def test_generate_has_the_models_own_cache() -> None:
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        make().generate(tokens(), cache_implementation="static", max_new_tokens=2)


@pytest.mark.parametrize("call", [lambda m: m(tokens(), attention_maks=None), lambda m: m.model(tokens(), last=3)])
def test_a_misspelt_argument_is_an_error(call: Callable[[ba.BamForCausalLM], object]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call(make())


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
    assert done.stdout.split() == ["bayesattn.models.bam.modeling", "16"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"input_ids": torch.tensor([[-1, 3]])}, r"input_ids has -1; tokens from 0 to [\d,]+ are known"),
        ({"input_ids": torch.tensor([[10**6]])}, "input_ids has 1000000; tokens from 0"),
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids is torch.int64 of shape \[2\]; a tensor of integers \[batch"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids is torch.float32"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"labels": torch.tensor([[5000, 1]])}, "labels has 5000; tokens from 0 to .* or -100 where nothing is to be"),
        ({"attention_mask": torch.tensor([[0.3, 1.0]])}, "attention_mask has values other than 0 and 1"),
        ({"attention_mask": torch.tensor([[0.0, -1e9]])}, "attention_mask has values other than 0 and 1"),
    ],
)
def test_tokens_and_masks_that_cannot_be_get_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()(**{"input_ids": torch.tensor([[1, 2]]), **arguments})
