"""A rotary model reads past its training length: exact below the window, by the formula beyond it."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2Model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import bayesattn as ba
from bayesattn.adapt.extension import Extension, ExtensionSettings
from bayesattn.adapt.layout import Layout
from bayesattn.errors import UserError
from tests.adapt.cases import FAMILIES, make_model, packed_positions, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5
# Families of the cases whose rotations are known, and some that rotate in other ways.
EXTENDED = [family for family in FAMILIES if family not in ("Gemma2", "Phi", "GPT2", "GptOss")]


# Key/value heads that look only near, one of each layer.
NEAR = [(0, 1), (1, 0)]


def extended(family: str = "Llama", window: int = 6, **settings: Any) -> Any:
    """A tiny model that was trained to 12 tokens, say, and reads more."""
    return ba.extend(make_model(family), window, train_length=12, **settings)


@pytest.mark.parametrize("family", EXTENDED)
def test_below_the_window_the_model_says_what_it_said(family: str) -> None:
    model, x = make_model(family), tokens()
    wanted, base = model(x).logits, type(model)
    ba.extend(model, window=21)
    assert torch.allclose(model(x).logits, wanted, atol=CLOSE)
    mask = padding(x, "left")
    assert torch.allclose(
        model(x, attention_mask=mask).logits[0, 5:], make_model(family)(x, attention_mask=mask).logits[0, 5:], atol=1e-4
    )
    ba.remove_prior(model)
    assert type(model) is base
    assert torch.equal(model(x).logits, wanted)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_without_gradients_they_are_the_very_numbers_of_the_model(family: str) -> None:
    model, x = make_model(family), tokens()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = model(x).logits
        assert torch.equal(ba.extend(model, window=21)(x).logits, wanted)


def test_interleaved_rotations_are_those_of_the_model() -> None:
    from transformers import CohereConfig, CohereForCausalLM, GlmConfig, GlmForCausalLM

    from tests.adapt.cases import SMALL

    x = tokens()
    for model in (CohereForCausalLM(CohereConfig(**SMALL)), GlmForCausalLM(GlmConfig(**SMALL, head_dim=8))):
        wanted = model.eval()(x).logits
        assert torch.allclose(ba.extend(model, window=21)(x).logits, wanted, atol=CLOSE)


def attention_of(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values `[B, H, N, D]` of the first layer, not rotated, and what it adds to the states."""
    layer, seen = model.model.layers[0].self_attn, {}
    hook = layer.register_forward_hook(
        lambda _, args, kwargs, out: seen.update(given=kwargs["hidden_states"], out=out[0]), with_kwargs=True
    )
    model(x)
    hook.remove()
    states = [project(seen["given"]) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]
    return *(part.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for part in states), seen["out"]


def rotate(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """x `[B, H, N, M, D]` at the positions `[N, M]`."""
    cos, sin = model.model.rotary_emb(x, positions.flatten()[None])
    turned, _ = apply_rotary_pos_emb(x.flatten(2, 3), x.flatten(2, 3), cos, sin)
    return turned.view(x.shape)


@pytest.mark.parametrize(
    ("group", "sinks", "near"), [(None, None, None), (2, None, None), (None, 2, None), (None, 2, [(0, 1), (1, 0)])]
)
def test_each_pair_has_the_distance_of_the_formula(
    group: int | None, sinks: int | None, near: list[tuple[int, int]] | None
) -> None:
    """Every logit by itself: the key at rest and the query rotated by the distance that the pair is to have."""
    window, length = 6, 12
    model = extended(window=window, group=group, sinks=sinks, near=near)
    looks_near = torch.tensor([False, False, True, True] if near else [sinks is not None] * 4)[:, None, None]
    x = tokens(1, 31)
    q, k, v, out = attention_of(model, x)
    i, j = torch.arange(31)[:, None], torch.arange(31)
    distance = (i - j).clamp(min=0)
    far = torch.full_like(distance, window) if group is None else i // group - j // group + window - window // group
    turned = rotate(model, q[:, :, :, None].expand(-1, -1, -1, 31, -1), torch.where(distance < window, distance, far))
    logits = (turned * k.repeat_interleave(2, 1)[:, :, None]).sum(-1) / math.sqrt(8)
    counts = torch.arange(1, 32).expand(4, 1, 31)
    counts = torch.where(looks_near, counts.clamp(max=window + (sinks or 0)), counts)  # the keys that a query sees
    logits = logits * (counts.clamp(min=length).log() / math.log(length)).mT
    hidden = (j > i) | ((distance >= window) & (j >= (sinks or 0)) & looks_near)
    mixed = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    wanted = model.model.layers[0].self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
    assert torch.allclose(out, wanted, atol=CLOSE)


def test_near_heads_have_the_gradients_of_the_formula() -> None:
    """In float64, of queries, keys and values, in documents and with padding."""
    window, sinks = 6, 2
    model = extended(window=window, near=NEAR, sinks=sinks).double()
    drawn = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 25, 8, generator=drawn, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    ids = torch.tensor([[-1] * 4 + [0] * 21, [0] * 11 + [1] * 14])
    out = model.model.layers[0].self_attn.extension.attend(q, k, v, None, Layout(25, ids))
    i, j = torch.arange(25)[:, None], torch.arange(25)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0)
    place = torch.stack([(row[:, None] == row).tril().sum(-1) - 1 for row in ids])  # in the document
    distance = (i - j).clamp(min=0)
    turned = rotate(model, q[:, :, :, None].expand(-1, -1, -1, 25, -1), distance.clamp(max=window))
    logits = (turned * k.repeat_interleave(2, 1)[:, :, None]).sum(-1) / math.sqrt(8)
    looks_near = torch.tensor([False, False, True, True])[:, None, None]
    counts = (place + 1)[:, None, None]
    counts = torch.where(looks_near, counts.clamp(max=window + sinks), counts).double()
    logits = logits * (counts.clamp(min=12).log() / math.log(12)).mT
    far = looks_near & (distance >= window) & (place >= sinks)[:, None, None, :]
    hidden = (j > i) | ~same[:, None] | far
    wanted = logits.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0) @ v.repeat_interleave(2, 1)
    assert torch.allclose(out, wanted, atol=1e-6)  # angles are those of float32
    weights = torch.randn(out.shape, generator=drawn, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)), torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(got, expected, atol=1e-5)


def test_all_heads_near_are_a_window_and_sinks_and_none_are_a_model_that_clips() -> None:
    x = tokens(2, 31)
    every = [(layer, head) for layer in range(2) for head in range(2)]
    torch.testing.assert_close(extended(near=every)(x).logits, extended(sinks=4)(x).logits)
    torch.testing.assert_close(extended(near=[])(x).logits, extended()(x).logits)
    assert not torch.allclose(extended(near=NEAR)(x).logits, extended()(x).logits, atol=1e-3)
    torch.testing.assert_close(extended(near=NEAR, window=11)(x[:, :11]).logits, make_model("Llama")(x[:, :11]).logits)


def test_heads_of_layers_without_rotations_stay_as_they_are() -> None:
    model = extended("SmolLM3", near=[(0, 0), (1, 0)])
    assert (model.config.prior["extension"]["layers"], model.config.prior["extension"]["near"]) == ([0], [[0, 0]])


def test_a_temperature_is_a_law_of_a_published_model_or_none() -> None:
    x = tokens(1, 31)
    plain = extended(temperature=None)(x).logits
    law = ba.InklingScaling(4, length=12, strength=1 / math.log(12))
    assert torch.allclose(extended(temperature=law)(x).logits, extended()(x).logits, atol=CLOSE)
    assert torch.allclose(extended()(x).logits[:, :12], plain[:, :12], atol=CLOSE)
    assert not torch.allclose(extended()(x).logits[:, 12:], plain[:, 12:], atol=1e-3)
    assert not torch.allclose(extended(temperature=ba.Llama4Scaling(4, length=12))(x).logits, plain, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "near"),
    [("Llama", None), ("Qwen2", None), ("Gemma3", None), ("GPTNeoX", None), ("Llama", NEAR), ("Gemma3", NEAR),
     ("GPTNeoX", [(0, 0), (0, 3), (1, 2)])],
)  # fmt: skip
def test_padded_packed_and_continued_texts_have_the_logits_of_each_alone(
    family: str, near: list[tuple[int, int]] | None
) -> None:
    model, x = extended(family, near=near), tokens(2, 31)
    alone = model(x).logits
    mask = padding(x, "left", 4)
    moved = torch.cat([x[:1, :4], x[:1, :-4]], 1)
    assert torch.allclose(model(moved, attention_mask=mask[:1]).logits[:, 4:], alone[:1, :-4], atol=CLOSE)
    packed = torch.cat([x[:1, :19], x[1:]], 1)
    logits = model(packed, position_ids=packed_positions(19, 31), use_cache=False).logits
    assert torch.allclose(logits, torch.cat([alone[:1, :19], alone[1:]], 1), atol=CLOSE)
    cache, parts = None, []
    for piece in x.split([5, 1, 9, 1, 1, 14], 1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1), alone, atol=CLOSE)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_groups_count_from_the_start_of_a_document(family: str) -> None:
    model, x = extended(family, group=4), tokens(2, 31)
    alone = model(x).logits
    moved = torch.cat([x[:1, :3], x[:1, :-3]], 1)
    mask = padding(x, "left", 3)[:1]
    assert torch.allclose(model(moved, attention_mask=mask).logits[:, 3:], alone[:1, :-3], atol=CLOSE)
    packed = torch.cat([x[:1, :18], x[1:]], 1)
    logits = model(packed, position_ids=packed_positions(18, 31), use_cache=False).logits
    assert torch.allclose(logits, torch.cat([alone[:1, :18], alone[1:]], 1), atol=CLOSE)
    cache, parts = None, []
    for piece in moved.split([19, 1, 1, 10], 1):
        done = sum(part.shape[1] for part in parts) + piece.shape[1]
        output = model(piece, attention_mask=mask[:, :done], past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1)[:, 3:], alone[:1, :-3], atol=CLOSE)


@pytest.mark.parametrize("settings", [{"group": 4}, {"sinks": 2}])
def test_what_counts_from_the_first_token_needs_a_cache_that_has_it(settings: dict[str, int]) -> None:
    x = tokens(1, 31)
    model = ba.extend(make_model("Mistral", sliding_window=9), 6, train_length=12, **settings)
    with pytest.raises(UserError, match="use_cache=False"):
        model.generate(x, max_new_tokens=2, do_sample=False)
    model.generation_config.eos_token_id = None
    written = model.generate(x, max_new_tokens=2, do_sample=False, use_cache=False)
    assert torch.equal(model(written).logits[:, 30:-1].argmax(-1), written[:, 31:])


def test_generation_continues_what_the_model_says() -> None:
    model, x = extended(), tokens(length=9)
    written = model.generate(x, attention_mask=padding(x, "left", 3), max_new_tokens=20, do_sample=False, min_length=29)
    free = written[1:]
    logits = model(free).logits[:, 8:-1]
    logits[..., 2] = -torch.inf  # the end, which min_length forbids
    assert torch.equal(logits.argmax(-1), free[:, 9:])


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_a_saved_model_is_extended_when_it_is_loaded(tmp_path: Path, auto: Any) -> None:
    model, x = extended(temperature=ba.MistralScaling(4, length=12), near=NEAR), tokens(2, 31)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    wanted = model if auto is AutoModelForCausalLM else model.model
    assert torch.equal(loaded(x)[0], wanted(x)[0])
    check_refused(lambda: ba.extend(loaded, 6), "is extended already; bayesattn.remove_prior(model) takes that away")
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.allclose(half(x)[0].float(), wanted(x)[0], atol=0.1)


def test_a_model_without_near_heads_is_saved_as_before_there_were_any(tmp_path: Path) -> None:
    extended().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["prior"]["extension"]
    assert {*saved} == {"window", "length", "layers", "temperature", "group", "sinks"}


@pytest.mark.parametrize("near", [None, NEAR])
def test_copies_and_compiled_models_are_extended_too(near: list[tuple[int, int]] | None) -> None:
    model, x = extended(near=near), tokens(2, 31)
    wanted = model(x).logits
    copied = copy.deepcopy(model)
    assert copied.model.layers[1].self_attn.extension.rotation.rotary is copied.model.rotary_emb
    assert torch.equal(copied(x).logits, wanted)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x, use_cache=False).logits, wanted, atol=CLOSE)


def test_an_extended_model_trains_with_and_without_checkpointing() -> None:
    x, gradients = tokens(2, 31), []
    with torch.inference_mode():  # whose tables of rotations must not stay
        model = extended()
        model(x)
    for checkpointing in (False, True):
        model = extended(near=NEAR).train()
        with torch.inference_mode():
            model(x[:, :5])
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(x, labels=x).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(grad.abs().sum() > 0 for grad in gradients[0])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_priors_and_temperatures_of_add_prior_stay(tmp_path: Path) -> None:
    x = tokens(2, 31)
    priors = {"prior": ba.Laplace(4), "query_scale": ba.ScalableSoftmax(4), "scale_prior": False}
    model = ba.add_prior(make_model("Llama"), **priors)
    wanted = model(x).logits
    ba.extend(model, window=31)
    assert torch.allclose(model(x).logits, wanted, atol=CLOSE)
    near = ba.extend(ba.add_prior(make_model("Llama"), **priors), window=6)
    assert not torch.allclose(near(x).logits, wanted, atol=1e-3)
    near.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x).logits, near(x).logits)


def test_a_window_prior_inside_the_window_has_no_far_part() -> None:
    x = tokens(2, 31)
    model = ba.add_prior(make_model("Llama"), ba.Window(4, 5))
    wanted = model(x).logits
    assert torch.allclose(ba.extend(model, window=6, temperature=None)(x).logits, wanted, atol=CLOSE)


def test_what_cannot_be_extended_is_refused_and_stays_as_it_was() -> None:
    x = tokens()
    known = "rotary positions as those of Llama"
    gpt2 = GPT2Model(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=64))
    faded = ba.add_prior(make_model("Llama"), ba.Uniform(4), position="drop")
    dynamic = make_model("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    sinks = ba.add_prior(make_model("Llama"), ba.Sinks(ba.Uniform(4)))
    for model, words in (
        (torch.nn.Linear(2, 2), "the model is a Linear; a model of transformers is needed"),
        (gpt2, "GPT2Model has no rotary positions that reach its attention"),
        (make_model("Phi"), f"rotates its queries and keys in a way that is not known; {known}"),
        (make_model("Gemma2"), "has softcap, or sinks"),
        (make_model("GptOss"), "has softcap, or sinks"),
        (sinks, "has sinks, which fit_priors adds; bayesattn.remove_prior(model) takes them away, and extend(near="),
        (ba.add_prior(make_model("Llama"), ba.ConditionedGaussian(4, 32)), "has a prior that depends on the query"),
        (faded, "sees only a share of its rotary positions"),
        (dynamic, "are 'dynamic', which depend on the length of the text"),
        (make_model("SmolLM3", no_rope_layers=[0, 0]), "has no layer with rotary positions"),
        (make_model("Llama").to("meta"), "has no weights yet"),
    ):
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        check_refused(lambda model=model: ba.extend(model, window=9, train_length=128), words)
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == implementation
    phi = make_model("Phi")
    wanted = phi(x).logits
    check_refused(lambda: ba.extend(phi, window=9), known)
    assert torch.equal(phi(x).logits, wanted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 256}, "window is 256; the model was trained to 256 tokens, so a whole number from 1 to 255"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5"),
        ({"temperature": "linear"}, "temperature is 'linear'; 'log', a law"),
        ({"temperature": ba.ScalableSoftmax(4)}, "temperature is ScalableSoftmax"),
        ({"temperature": ba.Llama4Scaling(3)}, "Llama4Scaling has 3 heads and layer 0 of the model has 4"),
        ({"train_length": "8k"}, "the training length is '8k'; a whole number of tokens is needed"),
        ({"group": 1}, "group is 1; a whole number of tokens from 2"),
        ({"sinks": 0}, "sinks is 0; a whole number of tokens from 1"),
        ({"sinks": 4, "group": 2}, "group and sinks are two ways to treat far keys"),
        ({"near": 3}, "near is 3; pairs of a layer's number and one of its key/value heads are needed"),
        ({"near": [0]}, "near is [0]; pairs"),
        ({"near": [(0, -1)]}, "near has (0, -1); pairs"),
        ({"near": [(0, 2)]}, "near has key/value head 2 of layer 0, which has 2, counted from 0"),
        ({"near": [(7, 0)]}, "near has layer 7; the model has attention in layers [0, 1]"),
        ({"near": [(0, 1)], "group": 2}, "group and sinks are two ways to treat far keys"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    check_refused(lambda: ba.extend(make_model("Llama"), **{"window": 9, **settings}), words)


def test_an_extended_model_gets_no_prior() -> None:
    check_refused(lambda: ba.add_prior(extended(), ba.Uniform(4)), "is extended already")
    check_refused(lambda: ba.fade_position(extended(), 0.5), "is extended, which needs all of its rotary positions")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"near": 5}, "near of the extension in the configuration is 5; a list is needed"),
        ({"near": [[0, "a"]]}, "pairs of a layer's number"),
        ({"near": [7]}, "pairs of a layer's number"),
        ({"layers": None}, "layers of the extension in the configuration is None; a list is needed"),
        ({"layers": ["one"]}, "layers of the extension in the configuration have 'one'; numbers are needed"),
        ({"window": "wide"}, "window is 'wide'"),
        ({"sinks": [4]}, "sinks is"),
        ({"temperature": 3}, "temperature in the configuration"),
        ({"wider": 1}, "what extend writes there is needed"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(damage: dict[str, Any], words: str) -> None:
    good = ExtensionSettings.of({"window": 6, "length": 12, "layers": [0, 1], "sinks": 4, "near": [[0, 1]]}).to_dict()
    with pytest.raises(UserError, match=re.escape(words)):
        Extension(ExtensionSettings.of({**good, **damage}), None)  # type: ignore[arg-type]
