from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from bayesattn.training.recipe import Augmentation, Data, Recipe, RecipeError, Training, load_recipe

SECTIONS = ("data", "augmentation", "training")
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
    changes = ["training.steps=7", "model.position=alibi", "data.retrieval_share=1", "training.betas=[0.8, 0.9]"]
    recipe = load_recipe(path, [*changes, "model.tolerance=1e-7"])
    assert recipe.name == "mine"
    assert recipe.training.lr == 1e-3
    assert recipe.training.steps == 7
    assert recipe.training.betas == (0.8, 0.9)
    assert recipe.data.retrieval_share == 1.0
    assert recipe.config().position == "alibi"
    assert recipe.config().tolerance == 1e-7


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        ("model: {positon: bam}", [], "model has no setting 'positon'; did you mean 'position'?"),
        ("model: {type: [bam]}", [], "model.type is ['bam']; bam and delayed_keys are allowed"),
        (
            "augmentation: {temperature_jitter: [1, 2]}",
            ["model.scalable_softmax=false"],
            "no head has Scalable Softmax",
        ),
        ("model: {type: llama}", [], "model.type is 'llama'; bam and delayed_keys are allowed"),
        (
            "model: {key_delay: 3}",
            [],
            "model.key_delay is given and model.type is bam; it is a setting of delayed_keys",
        ),
        ("model: {hindsight: 3}", [], "model.hindsight is now model.key_delay, of type delayed_keys"),
        ("training: {step: 3}", [], "training has no setting 'step'; did you mean 'steps'?"),
        ("modell: {}", [], "recipe has no setting 'modell'; did you mean 'model'?"),
        ("training: {steps: many}", [], "training.steps is 'many'; a whole number is needed"),
        ("training: {lr: fast}", [], "training.lr is 'fast'; a number is needed"),
        ("training: {steps: true}", [], "training.steps is True; a whole number is needed"),
        ("training: {steps: 1.5}", [], "training.steps is 1.5; a whole number is needed"),
        ("training: {lr: true}", [], "training.lr is True; a number is needed"),
        ("data: {spaced: 1}", [], "data.spaced is 1; true or false is needed"),
        ("data: {source: 5}", [], "data.source is 5; a word is needed"),
        ("data: {context: a}", [], "data.context is 'a'; a whole number is needed"),
        ("name: x", ["data.context=a"], "data.context is 'a'; a whole number is needed"),
        ("data: {facts: 3}", [], "data.facts is 3; a list of whole numbers is needed"),
        ("data: {facts: [1, 2.5]}", [], "data.facts is [1, 2.5]; a list of whole numbers is needed"),
        ("training: {betas: [0.9, x]}", [], "training.betas is [0.9, 'x']; a list of 2 numbers is needed"),
        ("training: {steps: 0}", [], "training.steps is 0; at least 1 is needed"),
        ("training: {batch: 0}", [], "training.batch is 0; at least 1 is needed"),
        ("training: {optimizer: sgd}", [], "training.optimizer is 'sgd'; muon, adamw or radam is needed"),
        ("training: {precision: fp16}", [], "training.precision is 'fp16'; fp32 or bf16 is needed"),
        ("data: {novel_share: 1.5}", [], "data.novel_share is 1.5; a share from 0 to 1 is needed"),
        ("data: {hard_share: 0.7}", [], "data.hard_share is 0.7; a share from 0 to 0.5 is needed"),
        ("data: {novl_share: 1}", [], "data has no setting 'novl_share'; did you mean 'novel_share'?"),
        ("model: {crowd: 7}", [], "model.crowd is now augmentation.in_batch_negatives"),
        ("name: x", ["model.crowd=7"], "model.crowd is now augmentation.in_batch_negatives"),
        ("model: {temperature_jitter: [1, 2]}", [], "model.temperature_jitter is now augmentation.temperature_jitter"),
        ("data: {retrieval: 1}", [], "data.retrieval is now data.retrieval_share"),
        ("data: {short: 1}", [], "data.short is now data.short_share"),
        ("data: {novel: 1}", [], "data.novel is now data.novel_share"),
        ("data: {early: 1}", [], "data.early is now data.early_share"),
        ("data: {swap: 1}", [], "data.swap is now data.swap_share"),
        ("data: {hard: 1}", [], "data.hard is now data.hard_share"),
        ("data: {numbers: 1}", [], "data.numbers is now data.numbers_share"),
        ("augmentation: {crowd: 7}", [], "augmentation has no setting 'crowd'; there are in_batch_negatives"),
        ("augmentation: 5", [], "augmentation is 5; a section of settings is needed"),
        (
            "augmentation: {in_batch_negatives: -1}",
            [],
            "augmentation.in_batch_negatives is -1; a number of other contexts is needed, 0 for none",
        ),
        (
            "augmentation: {in_batch_negatives: all}",
            [],
            "augmentation.in_batch_negatives is 'all'; a whole number is needed",
        ),
        (
            "model: {scalable_softmax: false}\naugmentation: {in_batch_negatives: 1}",
            [],
            "augmentation.in_batch_negatives is 1 and no head has Scalable Softmax; set model.scalable_softmax",
        ),
        (
            "augmentation: {temperature_jitter: 2}",
            [],
            "augmentation.temperature_jitter is 2; a list of numbers or null is needed",
        ),
        *(
            (
                f"augmentation: {{temperature_jitter: {jitter}}}",
                [],
                f"augmentation.temperature_jitter is {jitter}; two positive numbers are needed, the smaller first",
            )
            for jitter in ([], [1], [0, 1], [2, 1], [1, 2, 3])
        ),
        ("data: {questions: []}", [], "data.questions is []; whole numbers from 0 to 20 are needed, not all"),
        ("data: {questions: [0]}", [], "data.questions is [0]; whole numbers from 0 to 20 are needed, not all"),
        ("data: {facts: [true]}", [], "data.facts is [True]; a list of whole numbers is needed"),
        ("data: {context: 64}", [], "data.context is 64 and retrieval_share 0.6; facts and questions need a context"),
        ("data: {stream: true}", [], "data.stream is on and retrieval_share 0.6; a stream has no retrieval documents"),
        ("training: {final: 5}", [], "training.final is 5; a share of the learning rate from 0 to 1 is needed"),
        ("name: ''", [], "name is ''; the name of a folder is needed"),
        ("name: a/b", [], "name is 'a/b'; the name of a folder is needed"),
        ("model: {position: rope, rope_parameters: {rope_theta: hot}}", [], "rope_theta of rope_parameters is 'hot'"),
        ("model: {rope_parameters: {rope_type: yarn, factor: 0}}", [], "factor of rope_parameters is 0; a number"),
        ("data: {swap_share: 1.5}", [], "data.swap_share is 1.5; a share from 0 to 1 is needed"),
        ("data: {facts: [0]}", [], "data.facts is [0]; whole numbers from 1 to 20 are needed"),
        ("data: {numbers_share: 2}", [], "data.numbers_share is 2; a share from 0 to 1 is needed"),
        ("data: {early_share: 1.5}", [], "data.early_share is 1.5; a share from 0 to 1 is needed"),
        ("data: {questions: [-1, 1]}", [], "data.questions is [-1, 1]; whole numbers from 0 to 20 are needed"),
        ("data: {context: 0}", [], "data.context is 0; at least 2 tokens are needed"),
        ("training: {lr: -1}", [], "training.lr is -1; a number of at least 0 is needed"),
        ("training: {save_every: -1}", [], "training.save_every is -1; a number of at least 0 is needed"),
        ("training: {betas: [1]}", [], "training.betas is [1]; a list of 2 numbers is needed"),
        ("training: {betas: [0.9, 1]}", [], "training.betas is [0.9, 1]; two numbers from 0 up to 1 are needed"),
        ("training: {stop: 2000}", [], "training.stop is 2000; 0 or a number of steps up to 1,000 is needed"),
        ("seed: true", [], "seed is True; a whole number is needed"),
        ("seed: abc", [], "seed is 'abc'; a whole number is needed"),
        ("seed: -1", [], "seed is -1; 0 to 4294967295 are allowed"),
        ("model: 5", [], "model is 5; a section of settings is needed"),
        ("name: 5", [], "name is 5; a word is needed"),
        ("name: x", ["training.batch=["], "'training.batch=[' is not a change: '[' is not YAML"),
        ("training: 3", [], "training is 3; a section of settings is needed"),
        ("model: {position: nowhere}", [], "model.position is 'nowhere'; allowed are bam"),
        ("model: {num_hidden_layers: 0}", [], "model.num_hidden_layers is 0; it must be at least 1"),
        (
            "model: {tolerance: little}",
            [],
            "model.tolerance is 'little'; a number is needed",
        ),
        ("model: {prior_epsilon: 0}", [], "model.prior_epsilon is 0; a positive number is needed"),
        ("model: {position: window, window: 0}", [], "model.window is 0; at least 1 key is needed"),
        (
            "model: {position: rope, rope_parameters: {rope_type: x}}",
            [],
            "model: rope_type is 'x'; allowed are",
        ),
        ("model: {position: rope, rope_parameters: {rope_type: linear}}", [], "model: Missing required keys"),
        ("model: {prior_init: [[[1, -1]]]}", [], "model.prior_init must be [beta, scale] for each of 4 heads"),
        ("model: {training_length: 9}", [], "model.training_length is given; it is data.context, set that"),
        ("data: {answer_weight: -1}", [], "data.answer_weight is -1; a number of at least 0 is needed"),
        (
            "model: {rope_parameters: {rope_typ: yarn}}",
            [],
            "rope_parameters has no setting 'rope_typ'; did you mean 'rope_type'?",
        ),
        (
            "model: {scalable_softmax: [1]}",
            [],
            "model.scalable_softmax is [1]; true or false or a word or a list of true or false",
        ),
        (
            "model: {prior_init: 5}",
            [],
            "model.prior_init is 5; a word or a list of lists of lists of numbers or null is needed",
        ),
        ("expected: {parameters: many}", [], "expected is {'parameters': 'many'}; a section of numbers is needed"),
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


@pytest.mark.parametrize("name", ["none.yaml", "."])
def test_a_missing_recipe(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / name)


@pytest.mark.parametrize("section", [Data, Augmentation, Training, Recipe])
def test_every_setting_is_documented_where_it_is_declared(section: type) -> None:
    """By a string after it; sections of a recipe by their class."""
    for kind in section.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
        for setting, after in pairwise(body):
            if isinstance(setting, ast.AnnAssign) and ast.unparse(setting.target) not in SECTIONS:
                assert isinstance(after, ast.Expr), ast.unparse(setting)


def test_augmentation_is_read_and_merged_with_that_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("augmentation: {temperature_jitter: [0.5, 2], in_batch_negatives: 3}\n")
    path = write(tmp_path, "base: first.yaml\naugmentation: {in_batch_negatives: 7}\n")
    assert load_recipe(path).augmentation == Augmentation(7, [0.5, 2])
    changes = ["augmentation.temperature_jitter=null", "augmentation.in_batch_negatives=0"]
    assert load_recipe(path, changes).augmentation == Augmentation()


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


def test_a_change_to_nothing_is_the_empty_word_or_null(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("start: bam-tiny\naugmentation: {temperature_jitter: [0.5, 2]}")
    changed = load_recipe(tmp_path / "mine.yaml", ["start=", "augmentation.temperature_jitter=", "data.text_field= "])
    assert changed.start == ""
    assert changed.augmentation.temperature_jitter is None
    assert changed.data.text_field == ""
    with pytest.raises(RecipeError, match="start is None; a word is needed"):
        load_recipe(tmp_path / "mine.yaml", ["start=null"])
