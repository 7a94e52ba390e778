"""Nothing that comes in a file is executed: see SECURITY.md."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.errors import UserError
from bayesattn.training.recipe import load_recipe
from bayesattn.training.trainer import GENERATORS, ContextTrainer
from tests.models.cases import make


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The file that appears if code was executed."""
    return tmp_path / "executed"


def code(trace: Path) -> str:
    return f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass Config: pass\nclass Model: pass\n"


def test_unpickling_would_make_the_file(trace: Path) -> None:
    pickle.loads(pickle.dumps(Touch(trace)))
    assert trace.exists()


@pytest.mark.parametrize("model_type", ["stranger", "bam"])
def test_code_in_the_folder_of_a_model_is_not_run(model_type: str, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(code(trace))
    if model_type == "bam":
        ba.load_model(folder)
    else:
        with pytest.raises(UserError, match="is not a model"):
            ba.load_model(folder)
    assert not trace.exists()


def test_code_in_the_folder_of_a_tokenizer_is_not_run(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Model", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(code(trace))
    with pytest.raises(UserError, match="has no tokenizer that can be loaded"):
        ba.load_tokenizer(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("ours", [True, False])
def test_pickled_weights_are_not_executed(ours: bool, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if ours:
        make().save_pretrained(folder)
        (folder / "model.safetensors").unlink()
    else:
        from transformers import LlamaConfig

        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        ).save_pretrained(folder)
    torch.save({"lm_head.weight": Touch(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded"):
        ba.load_model(folder)
    assert not trace.exists()


def test_the_generators_of_a_checkpoint_are_not_executed(trace: Path, tmp_path: Path) -> None:
    torch.save({"cpu": Touch(trace)}, tmp_path / GENERATORS)
    with pytest.raises(pickle.UnpicklingError):
        ContextTrainer._load_rng_state(object(), str(tmp_path))  # type: ignore[arg-type]
    assert not trace.exists()


def test_a_recipe_makes_no_objects(trace: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: !!python/object/apply:os.mknod [{str(trace)!r}]")
    with pytest.raises(UserError, match=r"the tag .* a plain value is needed"):
        load_recipe(recipe)
    assert not trace.exists()
