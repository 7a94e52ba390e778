"""Settings of the published model: presets, checks, and names of earlier versions."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import bayesattn as ba
from bayesattn.models.bam.configuration import MOVED
from tests.models.cases import make

SOURCE = Path(ba.__file__).parent


def test_a_shared_prior_is_given_once() -> None:
    with pytest.raises(ValueError, match="4 heads in the one prior that layers share"):
        make(prior_init=[[[1.0, 1.0]] * 4] * 2, share_prior=True)


def test_a_preset_takes_changes_and_knows_its_settings() -> None:
    assert ba.BamConfig.preset("tiny", position="rope").position == "rope"
    with pytest.raises(ValueError, match="model has no setting 'positon'; did you mean 'position'"):
        ba.BamConfig.preset("tiny", positon="rope")
    with pytest.raises(ValueError, match="there is no preset 'huge'; there are tiny"):
        ba.BamConfig.preset("huge")
    with pytest.raises(ValueError, match="the setting crowd is of an earlier version; it is now augmentation"):
        ba.BamConfig.preset("tiny", crowd=3)


@pytest.mark.parametrize("name", MOVED)
def test_a_configuration_of_an_earlier_version_gets_one_sentence_with_the_new_name(name: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: None}))
    with pytest.raises(ValueError, match=f"the setting {name} is of an earlier version; it is now {MOVED[name]}"):
        ba.BamForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is not a model: the setting {name} is of an earlier version"):
        ba.load_model(str(tmp_path))


@pytest.mark.parametrize(
    "file",
    ["models/bam/configuration.py", "models/delayed_keys/configuration.py", "training/recipe.py", "data/mixture.py"],
)
def test_every_setting_is_documented_where_it_is_declared(file: str) -> None:
    classes = [node for node in ast.parse((SOURCE / file).read_text()).body if isinstance(node, ast.ClassDef)]
    undocumented = [
        f"{node.name}.{field.target.id}"
        for node in classes
        for field, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert undocumented == []
