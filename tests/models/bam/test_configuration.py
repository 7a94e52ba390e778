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


@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (3, 4), (5, 3), (12, 16)])
def test_reader_gives_half_of_the_last_layer_to_retrieval(layers: int, heads: int) -> None:
    settings = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 8 * heads}
    config = ba.BamConfig(**settings, prior_init="reader", scalable_softmax="retrieval")
    placed = [[beta <= 0 for beta in layer.self_attn.own_prior.theta_beta] for layer in ba.BamModel(config).layers]
    assert placed == config.scalable_heads()
    assert [sum(layer) for layer in placed] == [0] * (layers - 1) + [heads // 2]


def test_reader_lets_all_cross_layers_retrieve() -> None:
    config = ba.DelayedKeysConfig.preset(
        "tiny", prior_init="reader", scalable_softmax="retrieval", num_hidden_layers=5, cross_layers=2
    )
    assert [any(layer) for layer in config.scalable_heads()] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_hidden_layers": 1}, "prior_init is reader, with 1 layers of 4 heads; at least 2 of each are needed"),
        ({"num_attention_heads": 1}, "prior_init is reader, with 3 layers of 1 heads; at least 2 of each are needed"),
        ({"share_prior": True}, "prior_init is reader and share_prior true; it gives layers different priors"),
        ({"position": "alibi"}, "scalable_softmax is 'retrieval' and position 'alibi'; bam is needed"),
        ({"prior_init": "sampled"}, "scalable_softmax is 'retrieval' and prior_init sampled"),
    ],
)
def test_what_a_rule_cannot_place_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ba.BamConfig.preset("tiny", **{"prior_init": "reader", "scalable_softmax": "retrieval", **settings})


@pytest.mark.parametrize(("init", "heads"), [("zeros", 4), ("alibi", 0), ("spread", 2)])
def test_retrieval_is_scalable_softmax_for_heads_that_start_with_beta_up_to_zero(init: str, heads: int) -> None:
    config = ba.BamConfig.preset("tiny", prior_init=init, scalable_softmax="retrieval")
    assert [sum(layer) for layer in config.scalable_heads()] == [heads] * 3


@pytest.mark.parametrize(
    ("settings", "init", "scalable"),
    [
        ({}, "reader", "retrieval"),
        ({"prior_init": "zeros"}, "zeros", True),
        ({"scalable_softmax": False}, "reader", False),
        ({"num_hidden_layers": 1}, "zeros", True),
        ({"num_attention_heads": 1}, "zeros", True),
        ({"share_prior": True}, "zeros", True),
        ({"position": "rope"}, "zeros", True),
        ({"position": "cabam"}, "zeros", True),
    ],
)
def test_heads_are_placed_by_default_where_there_are_parts_to_give(
    settings: dict[str, object], init: str, scalable: bool | str
) -> None:
    config = ba.BamConfig(**settings)
    assert (config.prior_init, config.scalable_softmax) == (init, scalable)


def test_presets_of_the_paper_start_as_published() -> None:
    for name in ("l6", "l24"):
        config = ba.BamConfig.preset(name)
        assert (config.prior_init, config.scalable_softmax) == ("zeros", True)


def test_temperatures_leave_the_prior_of_alibi_alone_by_default() -> None:
    assert ba.BamConfig(position="alibi").scale_prior is False
    assert ba.BamConfig(position="alibi", scale_prior=True).scale_prior is True
    assert ba.BamConfig().scale_prior is True


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


@pytest.mark.parametrize("init", ["zeros", "alibi"])
def test_scalable_softmax_on_retrieval_heads_loads_whatever_places_them(init: str, tmp_path: Path) -> None:
    made = ba.BamForCausalLM(ba.BamConfig.preset("tiny", prior_init=init, scalable_softmax="retrieval"))
    made.save_pretrained(tmp_path)
    assert ba.BamForCausalLM.from_pretrained(tmp_path).config.scalable_heads() == made.config.scalable_heads()
