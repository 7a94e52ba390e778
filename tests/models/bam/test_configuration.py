"""Settings of the published model: presets, checks, and names of earlier versions."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import bayesattn as ba
from bayesattn.models.bam.configuration import MOVED
from tests.models.cases import make

SOURCE = Path(ba.__file__).parent
TWO_BY_FOUR = [[[1.0, 1.0]] * 4] * 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"position": "nowhere"}, "position is 'nowhere'; allowed are bam, alibi"),
        ({"num_key_value_heads": 3}, "4 heads and 3 key/value heads"),
        ({"key_delay": 3}, "key_delay is a setting of DelayedKeysConfig; BamConfig does not have it"),
        ({"hidden_size": 30}, "hidden_size 30 does not divide by 4 heads"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"tolerance": 1.0}, r"tolerance is 1\.0; 0 ≤ tolerance < 1 is needed"),
        ({"initializer_range": -1}, "initializer_range is -1; a positive number is needed"),
        ({"prior_init": "ones"}, "prior_init is 'ones'; allowed are zeros, alibi, spread, or a list"),
        ({"prior_init": [[[1.0, 2.0]]]}, r"prior_init must be \[beta, scale\] for each of 4 heads"),
        ({"prior_init": [[[float("nan"), 1.0]] * 4] * 2}, "a beta of prior_init is nan; a number from -100 to 100"),
        ({"prior_init": TWO_BY_FOUR, "share_prior": True}, "4 heads in the one prior that layers share"),
        ({"scalable_softmax": [True]}, "scalable_softmax must be true, false"),
        ({"position": "window", "window": 0}, "window is 0; at least 1 key is needed"),
        ({"position": "window", "window": [16, 32]}, "window has 2 numbers and the model 4 heads"),
        ({"position": "rope", "rope_parameters": {"rope_tpye": "yarn"}}, "rope_parameters has no setting 'rope_tpye'"),
        ({"position": "rope", "rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "rope_type is 'none'"),
        ({"position": "rope", "rope_parameters": {"rope_theta": 0}}, "rope_theta of rope_parameters is 0; a positive"),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(**settings)


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
