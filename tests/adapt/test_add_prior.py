"""A prior is added to a model of transformers, trains and goes away again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import bayesattn as ba
from bayesattn.adapt.add_prior import add_prior, fade_position, remove_prior
from tests.adapt.cases import FAMILIES, make_model, packed_positions, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5


def with_prior(family: str = "Llama", **settings: Any) -> Any:
    """A tiny model with a prior that is far from uniform, and temperatures."""
    return add_prior(make_model(family), ba.GeneralizedGaussian(4, "spread"), ba.ScalableSoftmax(4), **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_uniform_prior_changes_nothing_and_goes_away(family: str) -> None:
    model, x = make_model(family), tokens()
    wanted, weights, base = model(x).logits, {*model.state_dict()}, type(model)
    add_prior(model, ba.Uniform(4))
    assert (model(x).logits - wanted).abs().max() <= 1e-4
    with torch.no_grad():
        add_prior(remove_prior(model), ba.Laplace(4, learned=True), ba.ScalableSoftmax(4))
        assert (model(x).logits - wanted).abs().max() > 1e-3
    remove_prior(model)
    assert (type(model), {*model.state_dict()}) == (base, weights)
    assert torch.equal(model(x).logits, wanted)


def test_each_layer_has_the_attention_of_its_prior() -> None:
    """In a model of one layer, the prior is what `bayesian_attention` makes of it."""
    model, x = make_model("GPT2", n_layer=1), tokens()
    layer = model.transformer.h[0]
    prior, scale = ba.Laplace(4), ba.ScalableSoftmax(4)
    add_prior(model, prior, scale, scale_prior=False)
    seen = {}
    layer.attn.register_forward_hook(lambda _, args, output: seen.update(given=args[0], out=output[0]))
    model(x)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer.attn.c_attn(seen["given"]).chunk(3, -1))
    wanted = ba.bayesian_attention(q, k, v, prior, query_scale=scale, scale_prior=False, implementation="reference")
    assert torch.allclose(seen["out"], layer.attn.c_proj(wanted.transpose(1, 2).flatten(2)), atol=CLOSE)


def test_copies_of_the_prior_are_parameters_of_the_layers() -> None:
    given = ba.GeneralizedGaussian(4)
    model = add_prior(make_model("Llama"), given, ba.ScalableSoftmax(4))
    names = {name for name, _ in model.named_parameters() if "prior" in name or "temperature" in name}
    parts = ("prior.theta_alpha", "prior.theta_beta", "temperature.s")
    assert names == {f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in parts}
    assert not {id(parameter) for parameter in given.parameters()} & {id(parameter) for parameter in model.parameters()}
    assert {parameter.device.type for parameter in model.to("meta").parameters()} == {"meta"}


def test_layers_may_have_priors_of_their_own() -> None:
    frozen = ba.Laplace(4)
    model = add_prior(make_model("Llama"), [frozen, ba.GeneralizedGaussian(4)], [None, ba.ScalableSoftmax(4)])
    first, second = (layer.self_attn for layer in model.model.layers)
    assert (type(first.prior), first.temperature) == (ba.Laplace, None)
    assert isinstance(second.prior, ba.GeneralizedGaussian)
    assert isinstance(second.temperature, ba.ScalableSoftmax)


def test_layers_without_a_prior_stay_as_they_were() -> None:
    x = tokens()
    plain, model = make_model("Llama", num_hidden_layers=3), make_model("Llama", num_hidden_layers=3)
    add_prior(model, ba.Laplace(4), layers=[2])
    states = [each(x, output_hidden_states=True).hidden_states for each in (plain, model)]
    assert torch.allclose(states[0][2], states[1][2], atol=CLOSE)
    assert not torch.allclose(states[0][3], states[1][3], atol=1e-3)


def test_a_shared_prior_gets_the_gradient_of_all_layers() -> None:
    x = tokens()
    copies, shared = with_prior(), with_prior(shared=True)
    for model in (copies, shared):
        model(x, labels=x).loss.backward()
    gradients = [layer.self_attn.prior.theta_beta.grad for layer in copies.model.layers]
    assert torch.allclose(shared.model.layers[0].self_attn.prior.theta_beta.grad, sum(gradients), atol=1e-7)
    assert len([name for name in shared.state_dict() if "theta_beta" in name]) == 1


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3"])
def test_padded_packed_and_continued_texts_have_the_logits_of_each_alone(family: str) -> None:
    model, x = with_prior(family), tokens()
    alone = model(x).logits
    mask = padding(x, "left", 4)
    moved = torch.cat([x[:1, :4], x[:1, :-4]], 1)
    assert torch.allclose(model(moved, attention_mask=mask[:1]).logits[:, 4:], alone[:1, :-4], atol=CLOSE)
    packed = torch.cat([x[:1, :9], x[1:]], 1)
    logits = model(packed, position_ids=packed_positions(9, 21), use_cache=False).logits
    assert torch.allclose(logits, torch.cat([alone[:1, :9], alone[1:]], 1), atol=CLOSE)
    cache, parts = None, []
    for piece in x.split([8, 1, 12], 1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1), alone, atol=CLOSE)


def test_generation_continues_what_the_model_says() -> None:
    model, x = with_prior("Mistral"), tokens(length=9)
    written = model.generate(x, attention_mask=padding(x, "left", 3), max_new_tokens=6, do_sample=False)
    logits = model(written[1:]).logits
    assert torch.equal(logits[:, 8:-1].argmax(-1), written[1:, 9:])


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_checkpointing_changes_no_gradient(family: str) -> None:
    x, gradients = tokens(), []
    for checkpointing in (False, True):
        model = with_prior(family).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(x, labels=x).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))


def test_a_compiled_model_has_the_same_logits_and_gradients() -> None:
    x, results = tokens(), []
    for compiled in (False, True):
        model = with_prior(layers=[0], position="drop")
        call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        output = call(x, labels=x, use_cache=False)
        output.loss.backward()
        results.append([output.logits, model.model.layers[0].self_attn.prior.theta_beta.grad])
    assert all(torch.allclose(a, b, atol=CLOSE) for a, b in zip(*results, strict=True))


def test_the_trainer_of_transformers_trains_the_prior(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    model, x = with_prior(), tokens(batch=8)
    before = copy.deepcopy(model.model.layers[0].self_attn.prior.theta_beta)
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, gradient_checkpointing=True, disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": row} for row in x]
    Trainer(model, settings, train_dataset=rows).train()
    assert (model.model.layers[0].self_attn.prior.theta_beta != before).all()


def test_a_wrapped_prior_has_its_say() -> None:
    """PEFT replaces a module of `modules_to_save` by one that calls a copy of it."""

    class Wrapper(torch.nn.Module):
        def __init__(self, original: torch.nn.Module) -> None:
            super().__init__()
            self.original, self.trained = original, copy.deepcopy(original)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trained(x)

    model, x = with_prior(layers=[0]), tokens()
    layer = model.model.layers[0].self_attn
    layer.prior, layer.temperature = Wrapper(layer.prior), Wrapper(layer.temperature)
    model(x, labels=x).loss.backward()
    assert layer.prior.trained.theta_beta.grad is not None
    assert layer.temperature.trained.s.grad is not None
    assert layer.prior.original.theta_beta.grad is None


@pytest.mark.parametrize("family", ["Llama", "Phi", "GPTNeoX", "Qwen3"])
def test_without_positions_and_prior_the_order_of_a_text_is_not_seen(family: str) -> None:
    x = tokens()
    shuffled = torch.cat([x[:, :-1].flip(1), x[:, -1:]], 1)
    model = add_prior(make_model(family, num_hidden_layers=1), ba.Uniform(4), position="drop")
    assert torch.allclose(model(x).logits[:, -1], model(shuffled).logits[:, -1], atol=CLOSE)
    for given in (copy.deepcopy(model), model):
        again = remove_prior(given)
        assert not torch.allclose(again(x).logits[:, -1], again(shuffled).logits[:, -1], atol=1e-3)
        assert not any(module._forward_pre_hooks for module in again.modules())


def test_positions_fade_out() -> None:
    x = tokens()
    kept, dropped = (add_prior(make_model("Llama"), ba.Uniform(4), position=p)(x).logits for p in ("keep", "drop"))
    model = add_prior(make_model("Llama"), ba.Uniform(4))
    for share, wanted in ((0.0, dropped), (1.0, kept)):
        fade_position(model, share)
        assert torch.allclose(model(x).logits, wanted, atol=CLOSE)
    fade_position(model, 0.5)
    assert not torch.allclose(model(x).logits, kept, atol=1e-4)


def test_sinks_stay_visible_in_every_layer(tmp_path: Path) -> None:
    """A window with sinks: the first two tokens are seen from everywhere, and change what is far behind."""
    x = tokens()
    model = add_prior(make_model("Llama", num_hidden_layers=1), ba.Sinks(ba.Window(4, 3), count=2))
    other = x.clone()
    other[:, 5] = (x[:, 5] + 1) % 60 + 3
    assert torch.allclose(model(x).logits[:, 8:], model(other).logits[:, 8:], atol=CLOSE)
    other[:, 1] = (x[:, 1] + 1) % 60 + 3
    assert not torch.allclose(model(x).logits[:, 8:], model(other).logits[:, 8:], atol=1e-3)
    model(x, labels=x).loss.backward()
    assert model.model.layers[0].self_attn.prior.log_prior.grad is not None
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x).logits, model(x).logits)
    cache, parts = None, []
    for piece in x.split([7, 1, 13], 1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert torch.allclose(torch.cat(parts, 1), model(x).logits, atol=CLOSE)


def test_sinks_do_not_go_with_the_caps_of_models() -> None:
    model = make_model("Gemma2")
    check_refused(lambda: add_prior(model, ba.Sinks(ba.Uniform(4)), layers=[1]), "has softcap")
    add_prior(model, ba.Uniform(4), layers=[1])
    model.model.layers[1].self_attn.prior = ba.Sinks(ba.Uniform(4))
    check_refused(lambda: model(tokens()), "has softcap")


def test_what_the_model_came_with_is_not_changed() -> None:
    model = make_model("Llama")
    config = model.config
    before = config.to_dict(), type(config), config._attn_implementation
    add_prior(model, ba.Uniform(4))
    assert (config.to_dict(), type(config), config._attn_implementation) == before
    assert model.config is model.model.config is model.model.layers[0].self_attn.config


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    from transformers import BartConfig, BartModel, GPTJConfig, GPTJForCausalLM

    three, four, model = ba.Uniform(3), ba.Uniform(4), make_model("Llama")
    gptj = GPTJForCausalLM(GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4))
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    bart = BartModel(BartConfig(vocab_size=64, encoder_attention_heads=4, decoder_attention_heads=4, **sizes))
    check_refused(lambda: add_prior(gptj, four), "`bayesattn convert` takes BLOOM, MPT and Falcon")
    check_refused(lambda: add_prior(bart, four), "has an encoder and a decoder")
    check_refused(lambda: add_prior(torch.nn.Linear(2, 2), four), "before PEFT or torch.compile")  # type: ignore[arg-type]
    check_refused(lambda: add_prior(model, three), "Uniform has 3 heads and layer 0 of the model has 4")
    check_refused(lambda: add_prior(model, four, ba.ScalableSoftmax(3)), "ScalableSoftmax has 3 heads")
    check_refused(lambda: add_prior(model, [four]), "a sequence of 2, one for each layer")
    check_refused(lambda: add_prior(model, "alibi"), "a Prior, or a sequence of 2")  # type: ignore[arg-type]
    check_refused(lambda: add_prior(model, four, layers=[2]), "0 … 1, are needed")
    check_refused(lambda: add_prior(model, four, layers=[0, 0]), "each number may be there once")
    check_refused(lambda: add_prior(model, four, layers=[]), "numbers of layers with attention")
    check_refused(lambda: add_prior(model, four, position="none"), "'keep' and 'drop' are allowed")  # type: ignore[arg-type]
    check_refused(lambda: add_prior(model, four, shared=1), "True or False is needed")  # type: ignore[arg-type]
    check_refused(lambda: add_prior(make_model("GPT2"), four, position="drop"), "use position='keep'")
    check_refused(lambda: remove_prior(model), "which has no prior")
    check_refused(lambda: fade_position(model, 0.5), "which has no prior")
    assert "prior" not in repr(model)
    add_prior(model, four)
    check_refused(lambda: add_prior(model, four), "has a prior already")
    check_refused(lambda: model.set_attn_implementation("sdpa"), "bayesattn.remove_prior takes the priors away")
    check_refused(lambda: fade_position(model, 2), "a number from 0 to 1 is needed")
