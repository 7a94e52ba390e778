from __future__ import annotations

from pathlib import Path

import pytest

from bayesattn.training.recipe import RecipeError, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_read(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.config().training_length == recipe.data.context


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_changes_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {position: rope}\ntraining: {lr: 1e-3}\n")
    changes = ["training.steps=7", "model.position=alibi", "data.retrieval=1", "training.betas=[0.8, 0.9]"]
    recipe = load_recipe(path, [*changes, "model.tolerance=1e-7"])
    assert recipe.name == "mine"
    assert recipe.training.lr == 1e-3
    assert recipe.training.steps == 7
    assert recipe.training.betas == (0.8, 0.9)
    assert recipe.data.retrieval == 1.0
    assert recipe.config().position == "alibi"
    assert recipe.config().tolerance == 1e-7


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        ("model: {positon: bam}", [], "model has no setting 'positon'; did you mean 'position'?"),
        ("training: {step: 3}", [], "training has no setting 'step'; did you mean 'steps'?"),
        ("modell: {}", [], "recipe has no setting 'modell'; did you mean 'model'?"),
        ("training: {steps: many}", [], "training.steps is 'many'; a whole number is needed"),
        ("training: {lr: fast}", [], "training.lr is 'fast'; a number is needed"),
        ("training: {steps: 0}", [], "steps is 0"),
        ("training: {optimizer: sgd}", [], "optimizer is 'sgd'; muon, adamw and radam are allowed"),
        ("data: {novel: 1.5}", [], "data.novel is 1.5; a share from 0 to 1 is needed"),
        ("data: {hard: 0.7}", [], "data.hard is 0.7; a share from 0 to 0.5 is needed"),
        ("data: {questions: []}", [], "data.questions is []; whole numbers from 0 to 20 are needed, not all"),
        ("data: {questions: [0]}", [], "data.questions is [0]; whole numbers from 0 to 20 are needed, not all"),
        ("data: {facts: [true]}", [], "data.facts is [True]; whole numbers from 1 to 20 are needed"),
        ("data: {context: 64}", [], "data.context is 64 and data.retrieval 0.6; there is room for facts and questions"),
        ("training: {final: 5}", [], "final is 5.0; it is the share of the rate at the end, at most 1"),
        ("name: ''", [], "name is ''; the name of a folder is needed"),
        ("name: a/b", [], "name is 'a/b'; the name of a folder is needed"),
        ("model: {position: rope, rope_parameters: {rope_theta: hot}}", [], "rope_theta of rope_parameters is 'hot'"),
        ("model: {rope_parameters: {rope_type: yarn, factor: 0}}", [], "factor of rope_parameters is 0; a number"),
        ("data: {swap: 1.5}", [], "data.swap is 1.5; a share from 0 to 1 is needed"),
        ("data: {facts: [0]}", [], "data.facts is [0]; whole numbers from 1 to 20 are needed"),
        ("data: {numbers: 2}", [], "data.numbers is 2.0; a share from 0 to 1 is needed"),
        ("data: {early: 1.5}", [], "data.early is 1.5; a share from 0 to 1 is needed"),
        ("data: {questions: [-1, 1]}", [], "data.questions is [-1, 1]; whole numbers from 0 to 20 are needed"),
        ("data: {context: 0}", [], "data.context is 0; at least 2 tokens are needed"),
        ("training: {lr: -1}", [], "lr is -1.0; it must not be negative"),
        ("training: {save_every: -1}", [], "save_every is -1; it must not be negative"),
        ("training: {betas: [1]}", [], "betas is [1]; two numbers from 0 to 1 are needed"),
        ("seed: abc", [], "seed is 'abc'; a whole number is needed"),
        ("seed: -1", [], "seed is -1; 0 to 4294967295 are allowed"),
        ("model: 5", [], "model is 5; a section of settings is needed"),
        ("name: 5", [], "name is 5; a word is needed"),
        ("name: x", ["training.batch=["], "'training.batch=[' is not a change: '[' is not YAML"),
        ("training: 3", [], "training is 3; it must be a section"),
        ("model: {position: nowhere}", [], "model: position is 'nowhere'; allowed are bam"),
        ("model: {num_hidden_layers: 0}", [], "model: num_hidden_layers is 0; it must be at least 1"),
        (
            "model: {tolerance: little}",
            [],
            "model: Field 'tolerance' with value 'little' doesn't match any type",
        ),
        ("model: {prior_epsilon: 0}", [], "model: prior_epsilon is 0; a positive number is needed"),
        ("model: {position: window, window: 0}", [], "model: window is 0; at least 1 key is needed"),
        (
            "model: {position: rope, rope_parameters: {rope_type: x}}",
            [],
            "model: rope_type is 'x'; allowed are",
        ),
        ("model: {position: rope, rope_parameters: {rope_type: linear}}", [], "model: Missing required keys"),
        ("model: {prior_init: [[[1, -1]]]}", [], "model: prior_init must be [beta, scale] for each of 4 heads"),
        ("model: {training_length: 9}", [], "model.training_length is given; it is data.context, set that"),
        ("data: {answer_weight: -1}", [], "data.answer_weight is -1.0; it must not be negative"),
        (
            "model: {rope_parameters: {rope_typ: yarn}}",
            [],
            "rope_parameters has no setting 'rope_typ'; did you mean 'rope_type'?",
        ),
        ("expected: {paramters: 5}", [], "expected has no setting 'paramters'; did you mean 'parameters'?"),
        ("bases: x", [], "recipe has no setting 'bases'; did you mean 'base'?"),
        ("name: x", ["base=y.yaml"], "base is changed to 'y.yaml'; it can be set in the recipe's file only"),
        ("1: 2", [], "recipe has no setting 1; there are base, name"),
        ("data: {1: 2}", [], "data has no setting 1; there are"),
        ("name: [", [], "is not YAML"),
        ("just words", [], "has no settings"),
        ("name: x", ["steps"], "'steps' is not a change; write section.key=value"),
        ("name: x", ["name.first=y"], "'name' is a value and not a section"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path: Path, text: str, changes: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match="there is no recipe"):
            load_recipe(path)


def test_a_recipe_on_top_of_another(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(
        "name: one\nstart: bam-tiny\nmodel: {position: rope, qk_norm: true}\ntraining: {steps: 5, lr: 1e-3}\n"
    )
    (tmp_path / "second.yaml").write_text("base: first.yaml\nseed: 1\nmodel: {position: alibi}\ntraining: {steps: 6}\n")
    recipe = load_recipe(write(tmp_path, "base: second.yaml\ntraining: {batch: 3}\n"), ["training.steps=7"])
    assert recipe.start == ""
    assert (recipe.name, recipe.seed, recipe.model) == ("mine", 1, {"position": "alibi", "qk_norm": True})
    assert (recipe.training.steps, recipe.training.batch, recipe.training.lr) == (7, 3, 1e-3)


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("none.yaml", r"there is no recipe .*none.yaml, the base of .*mine.yaml"),
        ("''", r"there is no recipe .*, the base of .*mine.yaml"),
        ("[1]", r"base is \[1\]; the file of a recipe is needed"),
        ("mine.yaml", r"mine.yaml is based on mine.yaml, and that on it"),
        ("round.yaml", r"round.yaml is based on mine.yaml, and that on it"),
    ],
)
def test_a_base_that_is_none(tmp_path: Path, base: str, sentence: str) -> None:
    (tmp_path / "round.yaml").write_text("base: mine.yaml\n")
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(write(tmp_path, f"base: {base}\n"))
