"""Models with sinks: caches, documents, saving, training, and what measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.compute.architecture import from_config
from bayesattn.errors import UserError
from bayesattn.studies.convergence.layers import read_layers
from bayesattn.studies.heads.measure import attentions, heads
from bayesattn.studies.passkey.dense import dense_logits
from bayesattn.training.optimizers import make_optimizer, parameter_groups
from bayesattn.training.recipe import RecipeError, Training, load_recipe
from tests.models.cases import assert_checkpointing_changes_no_gradient, make, make_delayed, tokens


def with_sinks(position: str = "bam", **changes: Any) -> ba.BamForCausalLM:
    model = make(position, sinks=3, **changes)
    for attention in attentions(model):
        assert isinstance(attention.prior, ba.Sinks)
        torch.nn.init.normal_(attention.prior.log_prior)
    return model


@pytest.mark.parametrize("position", ["bam", "window", "rope", "cabam", "profiles", "fire"])
@torch.no_grad()
def test_a_cache_changes_nothing(position: str) -> None:
    model, ids = with_sinks(position), tokens()
    model.model.chunk_size = 11
    whole = model(ids).logits
    cache = model.make_cache()
    first = model(ids[:, :25], past_key_values=cache).logits
    rest = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(25, 30)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(make(position)(ids).logits, whole, atol=1e-2)


def test_generate_with_left_padding_is_generate_without() -> None:
    model, ids = with_sinks("window"), tokens(length=20)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    settings = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    both = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(both[:1, 8:], model.generate(ids[:1, 8:], **settings))
    beams = model.generate(ids, num_beams=3, **settings)
    assert beams.shape == (2, 25)


@pytest.mark.parametrize("position", ["bam", "fire"])
@torch.no_grad()
def test_each_packed_document_has_its_own_sinks(position: str) -> None:
    model, ids = with_sinks(position), tokens(length=20)
    packed = model(ids.flatten()[None], position_ids=torch.arange(20).repeat(2)[None]).logits
    torch.testing.assert_close(packed.unflatten(1, (2, 20))[0], model(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"share_prior": True}], ids=str)
def test_saved_and_loaded_it_is_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    model, ids = with_sinks(**changes), tokens()
    model.save_pretrained(tmp_path)
    loaded = ba.BamForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert loaded.config.sinks == 3


@torch.no_grad()
def test_an_exported_model_reads_any_length() -> None:
    model = with_sinks()
    length = torch.export.Dim("length", min=1, max=4096)
    exported = torch.export.export(model, (tokens(1, 8),), dynamic_shapes={"input_ids": {1: length}}, strict=False)
    for n in (1, 2, 40):
        ids = tokens(1, n)
        torch.testing.assert_close(exported.module()(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_sinks_are_trained_with_the_priors() -> None:
    model, ids = with_sinks(), tokens()
    assert_checkpointing_changes_no_gradient(model)
    learned = [attention.prior.log_prior for attention in attentions(model)]
    in_group = {id(p) for p in parameter_groups(model)["prior"]}
    assert {id(p) for p in learned} <= in_group
    before = [p.detach().clone() for p in learned]
    optimizer, schedule = make_optimizer(model, Training(steps=20, warmup=0, lr=1e-3)), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.append(loss.item())
    assert schedule[-1] < 0.9 * schedule[0]
    assert all(not torch.equal(old, new) for old, new in zip(before, learned, strict=True))


def test_a_recipe_may_have_sinks() -> None:
    recipe = load_recipe(Path("recipes/bam-tiny.yaml"), ["model.sinks=4", "augmentation.in_batch_negatives=0"])
    config = recipe.config()
    assert config.sinks == 4
    without = load_recipe(Path("recipes/bam-tiny.yaml")).config()
    more = from_config(config, "with").extra - from_config(without, "without").extra
    assert more == config.num_hidden_layers * config.num_attention_heads * 4
    with pytest.raises(RecipeError, match="keys of other contexts have no sinks"):
        load_recipe(Path("recipes/bam-tiny.yaml"), ["model.sinks=4", "augmentation.in_batch_negatives=3"])


@torch.no_grad()
def test_measurements_see_the_sinks_or_refuse_them() -> None:
    model, ids = with_sinks(), tokens(batch=1)
    for each in (model, with_sinks("cabam")):
        torch.testing.assert_close(dense_logits(each, ids), each(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="the model has 3 sinks"):
        read_layers(model, ids, "a model")

    class Read:
        def __init__(self, model: ba.BamForCausalLM) -> None:
            self.model = model

    without = heads(Read(make()), [64])  # type: ignore[arg-type]
    assert heads(Read(model), [64]) == without  # type: ignore[arg-type]


def test_delayed_keys_have_no_sinks() -> None:
    with pytest.raises(ValueError, match="one of the two must be 0"):
        make_delayed(key_delay=2, sinks=3)
    assert make_delayed(cross_layers=2, sinks=3)(tokens()).logits.isfinite().all()
