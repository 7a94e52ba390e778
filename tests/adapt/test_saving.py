"""Models with priors are saved and loaded as a whole, or not at all."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import bayesattn as ba
from bayesattn.adapt.add_prior import add_prior, fade_position, remove_prior
from bayesattn.adapt.structure import describe, make_prior
from bayesattn.compute.architecture import from_config
from tests.adapt.cases import FAMILIES, make_model, tokens
from tests.bad_inputs.rows import check_refused
from tests.priors.test_base import FAMILIES as PRIORS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_with_temperatures_is_loaded_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = ba.add_prior(
        make_model("Llama"), ba.Window(4, 9), ba.ScalableSoftmax(4, grows_with_length=[True, False] * 2)
    )
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    attention = loaded.model.layers[0].self_attn
    assert (attention.q_proj.weight.dtype, attention.temperature.s.dtype) == (dtype, torch.float32)
    assert attention.temperature.grows_with_length.dtype == torch.bool
    assert (loaded(tokens()).logits.float() - model(tokens()).logits).abs().max() < 0.1


def stirred(model: Any) -> Any:
    """The model with other numbers than those that its classes start with."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if ".prior." in name or ".temperature." in name:
                weights.add_(0.3 * torch.randn(weights.shape, generator=generator))
    return model


def saved(folder: Path, family: str = "Llama", **settings: Any) -> Any:
    model = add_prior(make_model(family), ba.GeneralizedGaussian(4, "spread"), ba.ScalableSoftmax(4), **settings)
    stirred(model).save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT2", "Mixtral", "GptOss"])
def test_a_saved_model_has_its_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.adapt import cases

    monkeypatch.setitem(cases.FAMILIES, "Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1})
    model = saved(tmp_path, family, scale_prior=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert torch.equal(type(model).from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)
    plain = remove_prior(copy.deepcopy(model))
    plain.save_pretrained(tmp_path / "plain")
    assert "prior" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded_plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager")
    assert torch.allclose(loaded_plain(tokens()).logits, plain(tokens()).logits, atol=1e-6)


def test_buffers_that_are_not_saved_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FalconH1 makes buffers of its layers in the model around them."""
    from tests.adapt import cases

    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "ssm_multipliers": [2.0] * 5}
    monkeypatch.setitem(cases.FAMILIES, "FalconH1", sizes)
    buffers = dict(saved(tmp_path, "FalconH1").named_buffers())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert any(name.endswith("mup_vector") for name in buffers)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in loaded.named_buffers())


def test_pickles_and_copies_have_the_logits(tmp_path: Path) -> None:
    model, x = saved(tmp_path, shared=True, position="drop"), tokens()
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other) is type(model)
        assert type(other.config) is type(model.config)
        assert torch.equal(other(x).logits, model(x).logits)
    torch.save(model, tmp_path / "model.pt")
    program = f"import torch; print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False).config.prior)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(model.config.prior), done.stderr


def test_layers_sharing_and_faded_positions_are_saved(tmp_path: Path) -> None:
    model = saved(tmp_path, layers=[1, 0], shared=True)
    fade_position(model, 0.25)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    first, second = (layer.self_attn for layer in loaded.model.layers)
    assert first.prior_owner is second


@pytest.mark.parametrize("name", PRIORS)
def test_every_prior_is_made_again_from_its_description(name: str) -> None:
    prior = PRIORS[name]()
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(0.1)
    made = make_prior(json.loads(json.dumps(describe(prior))))
    made.load_state_dict(prior.state_dict())
    assert repr(made) == repr(prior)
    assert [*dict(made.named_parameters())] == [*dict(prior.named_parameters())]
    assert torch.equal(made(torch.arange(40)), prior(torch.arange(40)))


class Steps(ba.Prior):
    """A prior of somebody else."""

    def __init__(self, num_heads: int, height: float) -> None:
        super().__init__(num_heads)
        self.height = height

    def forward(self, distance: Tensor) -> Tensor:
        return (-self.height * (distance // 4).float()).expand(self.num_heads, *distance.shape)


class Forgetful(Steps):
    def __init__(self, num_heads: int, steps: int) -> None:
        super().__init__(num_heads, 1.0 / steps)


def test_a_prior_of_your_own_is_saved_by_its_settings(tmp_path: Path) -> None:
    model = add_prior(make_model("Llama"), [Steps(4, 0.1), Steps(4, 0.7) * ba.Laplace(4)])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    check_refused(lambda: add_prior(make_model("Llama"), Forgetful(4, 3)), "define settings()")


def test_priors_stay_in_float32(tmp_path: Path) -> None:
    saved(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    attention = loaded.model.layers[0].self_attn
    assert (attention.q_proj.weight.dtype, attention.prior.theta_beta.dtype) == (torch.bfloat16, torch.float32)


def test_other_auto_classes_load_it(tmp_path: Path) -> None:
    model = saved(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert classifier(tokens()).logits.shape == (2, 2)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert {*made.state_dict()} == {*model.state_dict()}


def test_the_package_itself_reads_it(tmp_path: Path) -> None:
    model = saved(tmp_path)
    assert torch.equal(ba.load_model(tmp_path)(tokens()).logits, model(tokens()).logits)
    plain = from_config(make_model("Llama").config, "a name")
    content = json.loads((tmp_path / "config.json").read_text())
    assert from_config(model.config, "a name") == from_config(content, "a name") == plain
    rewritten(tmp_path, {"base_config": {**content["base_config"], "vocab_size": 10**15}})
    check_refused(lambda: ba.load_model(tmp_path), "vocab_size in its config.json is")


def rewritten(folder: Path, config: dict[str, Any] | None = None, drop: str = "", add: str = "") -> None:
    """Change the saved configuration, or drop or add weights."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    weights = {key: value for key, value in load_file(folder / "model.safetensors").items() if key != drop}
    if add:
        weights[add] = torch.zeros(4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


PLACE = "model.layers.1.self_attn"


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, drop=f"{PLACE}.prior.theta_beta")
    check_refused(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), f"{PLACE}.prior.theta_beta")
    saved(tmp_path)
    rewritten(tmp_path, add=f"{PLACE}.prior.theta_gamma")
    check_refused(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), f"{PLACE}.prior.theta_gamma")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"prior": None}, "what add_prior writes there is needed"),
        ({"prior": {"layers": [0]}}, "what add_prior writes there is needed"),
        ({"base_model_type": "lama"}, "a model type that transformers has is needed"),
        ({"base_model_type": None}, "a model type that transformers has is needed"),
        ({"base_config": 3}, "a section of settings is needed"),
        (
            {"prior": {"layers": [7], "priors": [{"family": "Uniform", "num_heads": 4}], "temperatures": [None]}},
            "no attention in layer 7",
        ),
        ({"prior": {"layers": [0], "priors": [{"family": "Os"}], "temperatures": [None]}}, "family 'Os' is not known"),
        ({"prior": {"layers": [0], "priors": [{"family": "Uniform"}], "temperatures": [None]}}, "does not fit Uniform"),
        ({"prior": {"layers": [0], "priors": [], "temperatures": [None]}}, "0 entries for 1 layers"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, config)
    check_refused(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), says)


def test_another_attention_is_refused_for_a_model_with_priors(tmp_path: Path) -> None:
    saved(tmp_path)
    check_refused(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa"), "has no priors")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_of_the_base_model_cannot_load_it(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    with pytest.raises(Exception, match="import bayesattn and load it with an Auto class"):
        model.base_class.from_pretrained(tmp_path)


def test_a_program_without_bayesattn_cannot_load_it(tmp_path: Path) -> None:
    saved(tmp_path)
    program = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "model type `bayesattn`" in done.stderr
