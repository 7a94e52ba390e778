"""After `import bayesattn`, in any order, transformers knows our models and our attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

import bayesattn as ba
from bayesattn.adapt import model_types
from bayesattn.models.shipped import shipped_names
from tests.adapt.cases import make_model
from tests.bad_inputs.rows import check_refused

LIGHT = """
import sys
import bayesattn
assert not {"torch", "transformers", "numpy"} & {*sys.modules}
"""
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoConfig, AttentionInterface, AttentionMaskInterface, pipeline
AttentionInterface()["bayesattn"], AttentionMaskInterface()["bayesattn"]
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/llama")).__name__ == "LlamaForCausalLMWithPrior"
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/bloom")).__name__ == "BayesBloomForCausalLM"
small = AutoModelForCausalLM.from_pretrained(bayesattn.shipped("bam-small"))
assert type(small).__module__ == "bayesattn.models.delayed_keys.modeling"
write = pipeline("text-generation", bayesattn.shipped("bam-tiny"))
assert type(write.model).__module__ == "bayesattn.models.bam.modeling"
assert write("The ", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("The ")
"""
# Shipped names, without a word to the hub.
NAMES = """
import os
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
import huggingface_hub
def never(*_, **__):
    raise SystemExit("the hub was asked")
for name in ("resolve_revision", "hf_hub_download", "snapshot_download"):
    setattr(huggingface_hub.HfApi, name, never)
model = AutoModelForCausalLM.from_pretrained("bam-tiny")
assert type(model).__module__ == "bayesattn.models.bam.modeling"
assert type(AutoModel.from_pretrained(pretrained_model_name_or_path="bam-tiny")).__name__ == "BamModel"
assert AutoConfig.from_pretrained("bam-small").model_type == "delayed_keys"
assert AutoTokenizer.from_pretrained("bam-tiny")("The ").input_ids
os.makedirs("bam-tiny")
model.save_pretrained("bam-tiny")
model.config.vocab_size = 3
model.config.save_pretrained("bam-tiny")
assert AutoConfig.from_pretrained("bam-tiny").vocab_size == 3  # a folder comes first
"""


FIRST = """
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import bayesattn
"""


@pytest.mark.parametrize(
    "program",
    [LIGHT + LOAD + NAMES, FIRST + LOAD + NAMES],
    ids=["bayesattn first", "transformers first"],
)
def test_auto_classes_and_pipelines_load_our_models(program: str, tmp_path: Path) -> None:
    ba.add_prior(make_model("Llama"), ba.Laplace(4)).save_pretrained(tmp_path / "llama")
    ba.BayesBloomForCausalLM(ba.BayesBloomConfig(hidden_size=32, n_head=4, n_layer=1)).save_pretrained(
        tmp_path / "bloom"
    )
    command, environment = [sys.executable, "-c", program, tmp_path], {**os.environ, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_attention_is_registered_whatever_is_imported_first() -> None:
    program = (
        "import bayesattn\nfrom bayesattn.adapt.attention_layers import attention_layers\n"
        "from transformers import AttentionInterface\nAttentionInterface()['bayesattn']"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_model_type_has_a_stand_in() -> None:
    """Programs import our configurations only when they read one; tests have imported them."""
    ours = {name for name, cls in CONFIG_MAPPING._extra_content.items() if cls.__module__.startswith("bayesattn.")}
    assert ours == {*model_types.HOMES}
    for name in ours:
        stand_in = type("Other", (model_types.StandIn,), {"model_type": name})
        assert stand_in.real_class() is CONFIG_MAPPING[name]
    assert type(type("Other", (model_types.StandIn,), {"model_type": "bam"})(hidden_size=64)) is ba.BamConfig


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "BloomConfig"])
def test_whatever_is_imported_first_our_configurations_are_known(name: str) -> None:
    program = (
        f"import bayesattn\nfrom transformers import {name}\nfrom transformers import AutoConfig\n"
        "assert [AutoConfig.for_model(kind).model_type for kind in ('bam', 'delayed_keys', 'bayes_bloom')]"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_shipped_model_has_a_folder() -> None:
    for name in shipped_names():
        assert (Path(ba.shipped(name)) / "model.safetensors").exists()
    for name in ("bam-huge", "", None, 3, "../bam-tiny"):
        check_refused(lambda name=name: ba.shipped(name), "there are alibi-tiny, bam-small, bam-tiny")
