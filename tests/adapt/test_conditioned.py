"""Priors that depend on the query, in models of transformers: attention, training, saving, and the caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.adapt.structure import describe, make_prior
from tests.adapt.cases import make_model, packed_positions, padding, tokens
from tests.adapt.test_cache import written
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5
HEADS, WIDTH = 4, 32
PRIORS: dict[str, Callable[[], ba.ConditionedPrior | ba.Sinks]] = {
    "gaussian": lambda: ba.ConditionedGaussian(HEADS, WIDTH, hidden=5),
    "profiles": lambda: ba.ProfileBank(HEADS, WIDTH, rank=3, extent=11),
    "fire": lambda: ba.Fire(HEADS, 8, hidden=5),
    "profiles × window": lambda: ba.ProfileBank(HEADS, WIDTH, rank=3, extent=11) * ba.Window(HEADS, 9),
    "sinks over gaussian": lambda: ba.Sinks(ba.ConditionedGaussian(HEADS, WIDTH, hidden=5), 2),
    "sinks over fire × laplace": lambda: ba.Sinks(ba.Fire(HEADS, 8) * ba.Laplace(HEADS, learned=True), 2),
}
priors = pytest.mark.parametrize("name", PRIORS)


def with_prior(name: str, family: str = "Llama", sizes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A tiny model with priors whose numbers are random and large enough to matter."""
    torch.manual_seed(3)
    model = ba.add_prior(make_model(family, **(sizes or {})), PRIORS[name](), ba.ScalableSoftmax(HEADS), **settings)
    with torch.no_grad():
        for place, weights in model.named_parameters():
            if ".prior." in place or "attn.prior" in place:
                weights.add_(0.5 * torch.randn(weights.shape))
    return model


def layer_of(model: Any) -> Any:
    """The first attention layer."""
    return model.transformer.h[0].attn if hasattr(model, "transformer") else model.model.layers[0].self_attn


@priors
def test_each_layer_has_the_attention_of_its_states(name: str) -> None:
    """In a model of one layer, it is what `bayesian_attention` makes of the layer's input."""
    model, x = with_prior(name, "GPT2", {"n_layer": 1}, scale_prior=False), tokens()
    layer, seen = layer_of(model), {}
    layer.register_forward_hook(lambda _, args, output: seen.update(states=args[0], out=output[0]))
    model(x)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer.c_attn(seen["states"]).chunk(3, -1))
    given = layer.prior.given(torch.arange(21) if "fire" in name else seen["states"])
    settings = {"query_scale": layer.temperature, "scale_prior": False, "implementation": "reference"}
    wanted = ba.bayesian_attention(q, k, v, given, **settings)
    assert torch.allclose(seen["out"], layer.c_proj(wanted.transpose(1, 2).flatten(2)), atol=CLOSE)


@priors
def test_every_parameter_of_every_layer_is_trained(name: str) -> None:
    model, x = with_prior(name, "Mistral"), tokens()
    model(x, labels=x).loss.backward()
    learned = {place: weights.grad for place, weights in model.named_parameters() if ".prior." in place}
    assert len(learned) == 2 * len([*PRIORS[name]().parameters()])
    # A constant for all keys but the sinks, as the last bias of Fire is, has no gradient without sinks.
    assert all(grad is not None and grad.isfinite().all() for grad in learned.values())
    moved = [place for place, grad in learned.items() if grad.abs().max() > 0]
    assert len(moved) >= len(learned) - 2


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("name", ["gaussian", "fire", "profiles × window"])
def test_padded_packed_and_continued_texts_have_the_logits_of_each_alone(name: str, family: str) -> None:
    """Also where a model's own window hides keys, and where it caps the content."""
    model, x = with_prior(name, family), tokens()
    alone = model(x).logits
    mask = padding(x, "left", 4)
    moved = torch.cat([x[:1, :4], x[:1, :-4]], 1)
    assert torch.allclose(model(moved, attention_mask=mask[:1]).logits[:, 4:], alone[:1, :-4], atol=CLOSE)
    packed = torch.cat([x[:1, :9], x[1:]], 1)
    logits = model(packed, position_ids=packed_positions(9, 21), use_cache=False).logits
    assert torch.allclose(logits, torch.cat([alone[:1, :9], alone[1:]], 1), atol=CLOSE)
    if name == "fire" and family != "Llama":
        return  # its cache drops what positions are counted from
    cache, parts = None, []
    for piece in x.split([8, 1, 12], 1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1), alone, atol=CLOSE)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@priors
def test_generation_with_any_cache_is_generation(name: str, family: str) -> None:
    x = tokens(length=30)
    mask = padding(x, "left")
    model = with_prior(name, family)
    wanted = written(model, x, attention_mask=mask, use_cache=False)
    caches = [model.make_cache()]
    if family == "Llama":
        caches.append(None)
    for cache in caches:
        got = written(model, x, attention_mask=mask, past_key_values=cache)
        assert torch.equal(got.sequences, wanted.sequences)
        assert torch.allclose(torch.stack(got.scores), torch.stack(wanted.scores), atol=1e-4)


def test_the_pruning_cache_keeps_what_the_static_factor_does_not_hide() -> None:
    model = with_prior("profiles × window")
    cache = model.make_cache()
    written(model, tokens(length=300), past_key_values=cache)
    assert cache.caches[0].spans == [9, 9]
    assert cache.bytes < 0.5 * cache.full_bytes


@priors
def test_a_saved_model_has_its_logits(name: str, tmp_path: Path) -> None:
    model, x = with_prior(name), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert repr(loaded) == repr(model)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weights.dtype for weights in layer_of(half).prior.parameters()} == {torch.float32}
    assert (half(x).logits.float() - model(x).logits).abs().mean() < 0.1


@priors
def test_every_prior_is_made_again_from_its_description(name: str) -> None:
    prior = PRIORS[name]()
    made = make_prior(describe(prior))
    made.load_state_dict(prior.state_dict())
    assert repr(made) == repr(prior)


def test_checkpointing_and_compiling_change_no_gradient() -> None:
    x, results = tokens(), []
    for way in ("plain", "checkpointing", "compiled"):
        model = with_prior("sinks over gaussian", layers=[0]).train()
        if way == "checkpointing":
            model.gradient_checkpointing_enable()
        call: Any = torch.compile(model, backend="eager", fullgraph=True) if way == "compiled" else model
        output = call(x, labels=x, use_cache=False)
        output.loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0], other, strict=True))


def test_a_shared_prior_reads_the_states_of_each_layer() -> None:
    x = tokens()
    copies, shared = with_prior("gaussian"), with_prior("gaussian", shared=True)
    own = layer_of(shared).prior
    for layer in copies.model.layers:
        layer.self_attn.prior.load_state_dict(own.state_dict())
    assert torch.allclose(copies(x).logits, shared(x).logits, atol=CLOSE)


def test_states_leave_nothing_behind() -> None:
    model, x = with_prior("gaussian"), tokens()
    before = {name: [*vars(module)] for name, module in model.named_modules()}
    model(x)
    assert {name: [*vars(module)] for name, module in model.named_modules()} == before
    for given in (copy.deepcopy(model), model):
        plain = ba.remove_prior(given)
        assert not any(module._forward_pre_hooks for module in plain.modules())
        assert torch.allclose(plain(x).logits, make_model("Llama")(x).logits, atol=CLOSE)


@pytest.mark.parametrize("name", ["gaussian", "sinks over fire × laplace"])
def test_lora_trains_and_loads_priors_of_parts(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, x = with_prior(name), tokens()
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["prior", "temperature"]
    )
    adapted = peft.get_peft_model(model, settings)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    adapted(x, labels=x).loss.backward()
    optimizer.step()
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = base(x).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(loaded(x).logits, adapted(x).logits, atol=CLOSE)
    assert not torch.allclose(loaded(x).logits, before, atol=1e-3)


class NoRoom(torch.nn.Module):
    """Attention that takes no further arguments."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return hidden_states


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    from bayesattn.adapt.query_prior import check_states

    x = tokens()
    check_refused(
        lambda: ba.add_prior(make_model("Llama"), ba.ConditionedGaussian(4, 16)),
        "ConditionedGaussian reads states of width 16, and those of LlamaAttention have 32",
    )
    check_refused(lambda: ba.add_prior(make_model("Llama"), ba.ProfileBank(4, 16) * ba.Window(4, 3)), "have 32")
    check_refused(lambda: check_states(NoRoom(), ba.ProfileBank(4, 32)), "does not hand its states on")
    check_refused(lambda: written(with_prior("fire", "Mistral"), x), "from which Fire counts")
    model = with_prior("gaussian")
    layer_of(model).prior = torch.nn.Sequential(layer_of(model).prior)
    check_refused(lambda: model(x), "the prior is wrapped in a Sequential")
