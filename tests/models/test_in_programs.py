"""Our models in other people's programs: what PEFT, torch.export, torch.compile and pipelines do with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache, StaticCache

import bayesattn as ba
from tests.bad_inputs.rows import check_sentence
from tests.models.cases import make, make_delayed, tokens


@pytest.mark.parametrize("maker", [make, make_delayed])
@torch.no_grad()
def test_hidden_states_with_a_cache_are_those_without(maker: Any) -> None:
    model, ids = maker(), tokens()
    model.model.chunk_size = 11
    whole = model(ids, output_hidden_states=True).hidden_states
    cache = model.make_cache()
    parts = [
        model(part, past_key_values=cache, output_hidden_states=True).hidden_states for part in ids.split([25, 5], 1)
    ]
    for states, expected in zip(zip(*parts, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(states, 1), expected, atol=1e-4, rtol=1e-4)
    out = model.generate(
        ids, max_new_tokens=3, do_sample=False, pad_token_id=0, output_hidden_states=True, return_dict_in_generate=True
    )
    assert [tuple(step[-1].shape[:2]) for step in out.hidden_states[1:]] == [(2, 1)] * 2


def test_right_padding_in_generate_gets_one_sentence() -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, -6:] = 0
    with pytest.raises(ValueError, match="as in generate") as caught:
        make().generate(tokens(), attention_mask=mask, max_new_tokens=2, pad_token_id=0)
    check_sentence(str(caught.value), "padding must be on the left (tokenizer.padding_side = 'left')")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_transformers_gets_one_sentence(kind: str) -> None:
    model = make()
    cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=64)
    for call in (model, model.generate):
        with pytest.raises(TypeError) as caught:
            call(tokens(), past_key_values=cache)
        check_sentence(str(caught.value), "make one with model.make_cache(), or leave it out of generate()")


def test_a_cache_of_another_model_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="past_key_values is the cache of another model; make one with"):
        make("alibi")(tokens(), past_key_values=make("window").make_cache())


def test_continuous_batching_gets_one_sentence_and_no_empty_output() -> None:
    for name in ("generate_batch", "init_continuous_batching"):
        with pytest.raises(NotImplementedError) as caught:
            getattr(make(), name)([[3, 4]])
        check_sentence(str(caught.value), "call generate() with a batch that is padded on the left")


def test_a_model_without_storage_takes_priors_from_lists() -> None:
    accelerate = pytest.importorskip("accelerate")
    lists = {"prior_init": [[[1.0, 2.0], [-0.5, 8.0], [2.0, 3.0], [0.5, 1.0]]] * 2}
    for without_storage in (accelerate.init_empty_weights, lambda: torch.device("meta")):
        with without_storage():
            model = make(**lists)
        assert model.device.type == "meta"
        model.load_state_dict(make(**lists).state_dict(), assign=True)
        torch.testing.assert_close(model(tokens()).logits, make(**lists)(tokens()).logits)


@pytest.mark.parametrize("position", ["bam", "rope", "sinusoidal"])
@torch.no_grad()
def test_an_exported_model_reads_any_length(position: str) -> None:
    model = make(position)
    length = torch.export.Dim("length", min=1, max=4096)
    exported = torch.export.export(model, (tokens(1, 8),), dynamic_shapes={"input_ids": {1: length}}, strict=False)
    for n in (1, 7, 100):
        ids = tokens(1, n)
        torch.testing.assert_close(exported.module()(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_compiled_forward_is_one_graph_and_generates() -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, ids = make(), tokens(1, 8)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain, logits = model.generate(ids, **settings), model(ids).logits
    model.forward = torch.compile(model.forward, backend=count, fullgraph=True)
    torch.testing.assert_close(model(ids).logits, logits)
    assert len(graphs) == 1
    torch.compiler.reset()
    model = make()
    model.forward = torch.compile(model.forward, backend=count)
    assert torch.equal(model.generate(ids, **settings), plain)
    assert len(graphs) <= 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_classified_with_padding_on_either_side(side: str, tmp_path: Path) -> None:
    make(pad_token_id=0).save_pretrained(tmp_path / "language-model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language-model", num_labels=3)
    assert isinstance(model, ba.BamForSequenceClassification)
    ids = tokens(length=12)
    alone = model(ids[:1, 4:]).logits
    padded, mask = ids.clone(), torch.ones_like(ids)
    shift = 0 if side == "left" else -4
    padded, mask[0, :4] = padded.roll(0), 0
    padded[0, :4] = 0
    padded[0], mask[0] = padded[0].roll(shift), mask[0].roll(shift)
    out = model(padded, attention_mask=mask, labels=torch.tensor([2, 0]))
    torch.testing.assert_close(out.logits[:1], alone, atol=1e-4, rtol=1e-4)
    out.loss.backward()
    assert model.model.layers[0].self_attn.own_prior.theta_beta.grad is not None
    model.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_classifier_needs_the_weights_of_the_layers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "layers.1" not in k}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights, model\.layers\.1"):
        ba.BamForSequenceClassification.from_pretrained(tmp_path)


class Wrapped(nn.Module):
    """What PEFT makes of a module in `modules_to_save`."""

    def __init__(self, original: nn.Module, copied: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copied})
        self.active_adapters, self.disable_adapters = ["default"], False


def test_a_wrapped_prior_is_the_copy_that_is_trained() -> None:
    model, ids = make(), tokens()
    plain = model(ids).logits
    for layer in model.model.layers:
        copied = ba.GeneralizedGaussian(4, "alibi")
        layer.self_attn.own_prior = Wrapped(layer.self_attn.own_prior, copied)
    changed = model(ids).logits
    assert not torch.allclose(changed, plain, atol=1e-3)
    torch.testing.assert_close(model(ids, use_cache=True).logits, changed, atol=1e-4, rtol=1e-4)
    for layer in model.model.layers:
        layer.self_attn.own_prior.disable_adapters = True
    torch.testing.assert_close(model(ids).logits, plain)
    shared = make(share_prior=True)
    shared.model.shared_prior = Wrapped(shared.model.shared_prior, ba.GeneralizedGaussian(4))
    with pytest.raises(ValueError, match="leave it out of modules_to_save") as caught:
        shared(ids)
    check_sentence(str(caught.value), "shared_prior is in a Wrapped")


def test_lora_trains_and_saves_priors_and_temperatures(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    make().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["own_prior", "temperature"], task_type="CAUSAL_LM"
    )
    model, ids = peft.get_peft_model(make(), config), tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = model(input_ids=ids, labels=ids).loss
    before.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    for part in ("own_prior.modules_to_save.default.theta_beta", "temperature.modules_to_save.default.s", "lora_B"):
        assert any(part in name for name in trained)
    assert all(p.requires_grad == ("lora" in n or "modules_to_save" in n) for n, p in model.named_parameters())
    optimizer.step()
    assert model(input_ids=ids, labels=ids).loss < before
    generated = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0), generated)
