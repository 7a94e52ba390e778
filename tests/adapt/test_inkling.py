"""Inkling under a prior: its own bias is read without being written out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, InklingForCausalLM, InklingTextConfig

import bayesattn as ba
from tests.adapt.cases import SMALL, padding, tokens
from tests.bad_inputs.rows import check_refused

CLOSE = 1e-5
LAYERS = ["hybrid", "hybrid_sliding"]


def make_model(implementation: str = "eager", log_scaling_n_floor: int | None = 4) -> Any:
    """A layer over the whole text, with temperatures from the fourth token on, and a sliding one."""
    torch.manual_seed(0)
    sizes = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "head_dim": 8, "swa_head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 16}
    config = InklingTextConfig(
        **SMALL, **sizes, **experts, layer_types=LAYERS, sliding_window_size=6, rel_extent=11, d_rel=3,
        log_scaling_n_floor=log_scaling_n_floor, log_scaling_alpha=0.5,
    )  # fmt: skip
    config._attn_implementation = implementation
    model = InklingForCausalLM(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1 and "embed" not in name and "lm_head" not in name:
                weights.normal_(std=0.3)
    return model


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a text, of a padded batch, of steps with a cache, and gradients of the bank and of its mixture."""
    x = tokens()
    mask = padding(x, "left")
    output = model(x, labels=x)
    layers = [layer.self_attn for layer in model.model.layers]
    weights = [part for layer in layers for part in (layer.rel_logits_proj.proj, layer.r_proj.weight)]
    gradients = torch.autograd.grad(output.loss, weights)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    steps = model.generate(x, attention_mask=mask, **settings).scores
    return [output.logits, model(x, attention_mask=mask).logits[mask.bool()], torch.stack(steps), *gradients]


def same(ours: list[torch.Tensor], wanted: list[torch.Tensor], atol: float = CLOSE) -> bool:
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_uniform_prior_changes_nothing_and_goes_away(layers: list[int] | None) -> None:
    model = make_model()
    wanted = outputs(model)
    ba.add_prior(model, ba.Uniform(4), layers=layers)
    assert same(outputs(model), wanted)
    for given in (copy.deepcopy(model), model):
        assert same(outputs(ba.remove_prior(given)), wanted)
        assert not any("forward" in vars(module) for module in given.modules())


def test_nothing_of_the_size_of_all_pairs_is_written() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.numel())
            return result

    x, written = tokens(1, 600), {}
    for name in ("eager", "bayesattn"):
        model = make_model()
        if name == "bayesattn":
            ba.add_prior(model, ba.Uniform(4))
        with torch.no_grad(), Largest() as largest:
            model(x)
        written[name] = largest.numbers
    assert written["eager"] == 4 * 600**2
    assert written["bayesattn"] < 600**2


def test_its_bias_and_the_prior_are_multiplied() -> None:
    """The logs of the prior are added to the bias that Inkling writes out."""
    prior, x = ba.Laplace(4), tokens()
    place = torch.arange(x.shape[1])
    added = prior((place[:, None] - place).clamp(min=0))
    written = make_model(log_scaling_n_floor=None)
    for layer in written.model.layers:
        layer.self_attn.rel_logits_proj.register_forward_hook(lambda _, args, bias: bias + added)
    model = ba.add_prior(make_model(log_scaling_n_floor=None), prior)
    assert torch.allclose(model(x).logits, written(x).logits, atol=CLOSE)


def test_its_bias_fades_and_drops(tmp_path: Path) -> None:
    x = tokens()
    silent = make_model()
    with torch.no_grad():
        for layer in silent.model.layers:
            layer.self_attn.rel_logits_proj.proj.zero_()
    dropped = ba.add_prior(make_model(), ba.Uniform(4), position="drop")
    assert torch.allclose(dropped(x).logits, silent(x).logits, atol=CLOSE)
    ba.fade_position(dropped, 1.0)
    assert torch.allclose(dropped(x).logits, make_model()(x).logits, atol=CLOSE)
    ba.fade_position(dropped, 0.5)
    dropped.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).logits, dropped(x).logits)


def test_its_bias_may_be_replaced_by_a_prior_that_depends_on_the_query() -> None:
    model, x = make_model(), tokens()
    wanted = model(x).logits
    bank = [ba.ProfileBank(4, 32, rank=3, extent=extent) for extent in (11, 6)]
    own = [(layer.self_attn.rel_logits_proj.proj, layer.self_attn.r_proj.weight) for layer in model.model.layers]
    with torch.no_grad():
        for prior, (profiles, mixture) in zip(bank, own, strict=True):
            prior.bank.copy_(profiles)
            prior.mixture.weight.copy_(mixture)
    ba.add_prior(model, bank, position="drop")
    # Without the temperature of its first layer, which Inkling puts on its own bias.
    short = x[:, :4]
    assert torch.allclose(model(short).logits, wanted[:, :4], atol=CLOSE)


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    x = tokens()
    check_refused(lambda: ba.add_prior(make_model(), ba.ProfileBank(4, 32)), "give position='drop'")
    dropped = ba.add_prior(make_model(), ba.ProfileBank(4, 32), position="drop")
    ba.fade_position(dropped, 0.5)
    check_refused(lambda: dropped(x), "give position='drop'")
    check_refused(lambda: make_model("bayesattn")(x), "bayesattn.add_prior(model, prior) reads it")
    check_refused(lambda: dropped.make_cache(), "more to keep than keys")
