"""Recipes that cannot be followed: in a file, with --set, and in options of `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from bayesattn.data.mixture import Mixture
from bayesattn.errors import UserError
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.delayed_keys.configuration import DelayedKeysConfig
from bayesattn.training.recipe import Augmentation, Data, Recipe, RecipeError, Training, load_recipe, parse_recipe
from tests.bad_inputs.rows import Row, check_command_refused, check_refused, check_sentence

HUGE = "1" + "0" * 90  # digits that YAML reads as a number
TOO_LARGE = "numbers of at most 1,000,000,000,000,000 are allowed"

# A setting, its value in YAML, and part of the sentence.
ROWS = [
    Row("name", "[a]", "name is ['a']; a word is needed"),
    Row("name", "'..'", "name is '..'; the name of a folder is needed"),
    Row("name", "a/b", "name is 'a/b'; the name of a folder is needed"),
    Row("name", "k" * 201, "a name of at most 200 bytes is needed"),
    Row("data.source", "s" * 300, "a name of at most 255 bytes is needed"),
    Row("data.tokenizer", "a/" + "s" * 300, "a name of at most 255 bytes is needed"),
    Row("start", "é" * 200, "a name of at most 255 bytes is needed"),
    Row("name", r'"a\0b"', r"name is 'a\x00b'; characters that can be printed are needed"),
    Row("name", r'"\ud800"', r"name is '\ud800'; characters that can be printed are needed"),
    Row("name", "!!binary aGVsbG8=", "has the tag 'tag:yaml.org,2002:binary'; a plain value is needed"),
    Row("name", "!!python/object:os.system x", "a plain value is needed"),
    Row("name", "!!python/object/apply:os.getcwd []", "a plain value is needed"),
    Row("name", "!!timestamp 2020-13-45", "a plain value is needed"),
    Row("seed", "many", "seed is 'many'; a whole number is needed"),
    Row("seed", "0.5", "seed is 0.5; a whole number is needed"),
    Row("seed", "-1", "seed is -1; 0 to 4294967295 are allowed"),
    Row("seed", ".nan", "seed is nan; a finite number is needed"),
    Row("seed", HUGE, f"seed is a number of 299 bits; {TOO_LARGE}"),
    Row("seed", "1" * 5000, "has a number of 5,000 characters; at most 100 are allowed"),
    Row("seed", ":".join("1" * 3000), "has a number of 5,999 characters; at most 100 are allowed"),
    Row("start", "5", "start is 5; a word is needed"),
    Row("start", r'"a\0b"', "start is 'a\\x00b'; characters that can be printed are needed"),
    Row("start", "s" * 5000, "at most 4,096 characters are allowed, not 5,000"),
    Row("model", "[5]", "model is [5]; a section of settings is needed"),
    Row("model", "{5: 3}", "model is {5: 3}; a section of settings is needed"),
    Row("model", "&a {b: *a}", "has an alias; its value is needed in its place"),
    Row("model", "{a: 1, a: 2}", "has the key 'a' a second time; each is allowed once"),
    Row("model", "{[a, b]: 2}", "has a key of several values; a word is needed"),
    Row("model", "!!set {a, b}", "a plain value is needed"),
    Row("model", "{'<<': {preset: tiny}}", "model has no setting '<<'"),
    Row("model", "{dtype: evil}", "model has no setting 'dtype'; did you mean 'type'?"),
    Row("model", "{torch_dtype: evil}", "model has no setting 'torch_dtype'"),
    Row("model", "{problem_type: evil}", "model has no setting 'problem_type'"),
    Row("model", "{id2label: 5}", "model has no setting 'id2label'"),
    Row("model", "{architectures: [evil]}", "model has no setting 'architectures'"),
    Row("model", "{auto_map: {AutoConfig: evil}}", "model has no setting 'auto_map'"),
    Row("model", "{? k" + "k" * 5000 + " : 1}", "at most 4,096 characters are allowed"),
    Row("data", "[]", "data is []; a section of settings is needed"),
    Row("augmentation", "off", "augmentation is False; a section of settings is needed"),
    Row("training", "fast", "training is 'fast'; a section of settings is needed"),
    Row("expected", "5", "expected is 5; a section of numbers is needed"),
    Row("expected", "{parameters: many}", "expected is {'parameters': 'many'}; a section of numbers is needed"),
    Row("expected", "{parameters: .nan}", "expected.parameters is nan; a finite number is needed"),
    Row("expected", f"{{parameters: {HUGE}}}", TOO_LARGE),
    Row("expected", "{5: 3}", "expected is {5: 3}; a section of numbers is needed"),
    Row("base", "[1]", "base is [1]; the file of a recipe is needed"),
    Row("data.source", "5", "data.source is 5; a word is needed"),
    Row("data.source", r'"a\0b"', "data.source is 'a\\x00b'; characters that can be printed are needed"),
    Row("data.source", "s" * 5000, "at most 4,096 characters are allowed"),
    Row("data.text_field", "[text]", "data.text_field is ['text']; a word is needed"),
    Row("data.text_field", r'"\e"', "characters that can be printed are needed"),
    Row("data.tokenizer", "null", "data.tokenizer is None; a word is needed"),
    Row("data.tokenizer", r'"a\0b"', "data.tokenizer is 'a\\x00b'; characters that can be printed are needed"),
    Row("data.stream", "sometimes", "data.stream is 'sometimes'; true or false is needed"),
    Row("data.stream", "true", "data.stream is on and retrieval_share 0.6"),
    Row("data.context", "1.5", "data.context is 1.5; a whole number is needed"),
    Row("data.context", "1", "data.context is 1; at least 2 tokens are needed"),
    Row("data.context", ".inf", "data.context is inf; a finite number is needed"),
    Row("data.context", "1000000000", "data.context is 1,000,000,000; at most 16,777,216 is allowed"),
    Row("data.context", HUGE, TOO_LARGE),
    *(
        row
        for name in ("retrieval", "short", "novel", "early", "swap", "numbers")
        for row in (
            Row(f"data.{name}_share", "half", f"data.{name}_share is 'half'; a number is needed"),
            Row(f"data.{name}_share", "-0.1", f"data.{name}_share is -0.1; a share from 0 to 1 is needed"),
            Row(f"data.{name}_share", "1e9", f"data.{name}_share is 1000000000.0; a share from 0 to 1 is needed"),
            Row(f"data.{name}_share", ".nan", f"data.{name}_share is nan; a finite number is needed"),
        )
    ),
    Row("data.hard_share", "true", "data.hard_share is True; a number is needed"),
    Row("data.hard_share", "0.6", "data.hard_share is 0.6; a share from 0 to 0.5 is needed"),
    Row("data.hard_share", "-.inf", "data.hard_share is -inf; a finite number is needed"),
    Row("data.hard_share", "1e300", TOO_LARGE),
    Row("data.facts", "3", "data.facts is 3; a list of whole numbers is needed"),
    Row("data.facts", "[1, two]", "data.facts is [1, 'two']; a list of whole numbers is needed"),
    Row("data.facts", "[21]", "data.facts is [21]; whole numbers from 1 to 20 are needed"),
    Row("data.facts", "[.nan]", "data.facts is nan; a finite number is needed"),
    Row("data.facts", f"[{HUGE}]", TOO_LARGE),
    Row("data.facts", f"[{', '.join(['99'] * 9000)}]", "data.facts is [99, 99, 99"),
    Row("data.questions", "{1: 2}", "data.questions is {1: 2}; a list of whole numbers is needed"),
    Row("data.questions", "[-1]", "data.questions is [-1]; whole numbers from 0 to 20 are needed"),
    Row("data.questions", "[.inf]", "data.questions is inf; a finite number is needed"),
    Row("data.questions", "[1000000000000]", "data.questions is [1000000000000]; whole numbers from 0 to 20"),
    Row("data.spaced", "5", "data.spaced is 5; true or false is needed"),
    *(
        row
        for name in ("answer", "filler", "hay")
        for row in (
            Row(f"data.{name}_weight", "heavy", f"data.{name}_weight is 'heavy'; a number is needed"),
            Row(f"data.{name}_weight", "-1", f"data.{name}_weight is -1; a number of at least 0 is needed"),
            Row(f"data.{name}_weight", ".inf", f"data.{name}_weight is inf; a finite number is needed"),
            Row(f"data.{name}_weight", "1e12", f"data.{name}_weight is 1,000,000,000,000.0; at most 1,000,000"),
        )
    ),
    Row("augmentation.in_batch_negatives", "1.5", "augmentation.in_batch_negatives is 1.5; a whole number is needed"),
    Row("augmentation.in_batch_negatives", "-1", "a number of other contexts is needed, 0 for none"),
    Row("augmentation.in_batch_negatives", ".nan", "a finite number is needed"),
    Row("augmentation.in_batch_negatives", "10000000", "at most 1,000,000 is allowed"),
    Row("augmentation.temperature_jitter", "wide", "a list of numbers or null is needed"),
    Row("augmentation.temperature_jitter", "[2, 1]", "two positive numbers are needed, the smaller first"),
    Row("augmentation.temperature_jitter", "[1, .nan]", "augmentation.temperature_jitter is nan; a finite number"),
    Row("augmentation.temperature_jitter", "[1, 1e12]", "two positive numbers are needed, the smaller first"),
    *(
        row
        for name, least in {
            "steps": "at least 1 is needed",
            "batch": "at least 1 is needed",
            "stop": "0 or a number of steps up to 1,000 is needed",
            "device_batch": "a number of at least 0 is needed",
            "warmup": "a number of at least 0 is needed",
            "evaluate_every": "a number of at least 0 is needed",
            "save_every": "a number of at least 0 is needed",
        }.items()
        for row in (
            Row(f"training.{name}", "many", f"training.{name} is 'many'; a whole number is needed"),
            Row(f"training.{name}", "-1", f"training.{name} is -1; {least}"),
            Row(f"training.{name}", ".inf", f"training.{name} is inf; a finite number is needed"),
            Row(f"training.{name}", "1000000000000", f"training.{name} is 1"),
            Row(f"training.{name}", "1e308", TOO_LARGE),
            Row(f"training.{name}", HUGE, TOO_LARGE),
        )
    ),
    *(
        row
        for name in ("lr", "matrix_lr", "prior_lr", "weight_decay", "clip")
        for row in (
            Row(f"training.{name}", "fast", f"training.{name} is 'fast'; a number is needed"),
            Row(f"training.{name}", "-1e-3", f"training.{name} is -0.001; a number of at least 0 is needed"),
            Row(f"training.{name}", ".nan", f"training.{name} is nan; a finite number is needed"),
            Row(f"training.{name}", "1e12", f"training.{name} is 1,000,000,000,000.0; at most 1,000,000"),
            Row(f"training.{name}", "1e308", TOO_LARGE),
        )
    ),
    Row("training.final", "low", "training.final is 'low'; a number is needed"),
    Row("training.final", "1.5", "training.final is 1.5; a share of the learning rate from 0 to 1 is needed"),
    Row("training.final", ".nan", "training.final is nan; a finite number is needed"),
    Row("training.final", HUGE, TOO_LARGE),
    Row("training.betas", "0.9", "training.betas is 0.9; a list of 2 numbers is needed"),
    Row("training.betas", "[0.9, 1]", "two numbers from 0 up to 1 are needed"),
    Row("training.betas", "[0.9, .nan]", "training.betas is nan; a finite number is needed"),
    Row("training.betas", "[1e300, 0]", TOO_LARGE),
    Row("training.freeze", "5", "training.freeze is 5; "),
    Row("training.freeze", "[5]", "training.freeze is [5]; "),
    Row("training.optimizer", "sgd", "training.optimizer is 'sgd'; muon, adamw or radam is needed"),
    Row("training.optimizer", "[muon]", "training.optimizer is ['muon']; muon, adamw or radam is needed"),
    Row("training.precision", "16", "training.precision is 16; fp32 or bf16 is needed"),
    Row("model.type", "llama", "model.type is 'llama'; bam and delayed_keys are allowed"),
    Row("model.preset", "[tiny]", "model.preset is ['tiny']; a word is needed"),
    Row("model.preset", "huge", "model: there is no preset 'huge'; there are tiny"),
    *(
        row
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "prior_hidden", "profile_rank", "profile_extent",
        )
        for row in (
            Row(f"model.{name}", "big", f"model.{name} is 'big'; a whole number"),
            Row(f"model.{name}", "-1", f"model.{name} is -1; it must be at least 1"),
            Row(f"model.{name}", ".inf", f"model.{name} is inf; a finite number is needed"),
            Row(f"model.{name}", "100000000", f"model.{name} is 100000000; it must be at least 1 and at most"),
            Row(f"model.{name}", HUGE, TOO_LARGE),
        )
    ),
    Row("model", "{position: rope, head_dim: 3}", "head_dim is 3; an even number is needed for the position rope"),
    Row("model.weight_init", "odd", "weight_init is 'odd'; allowed are normal and published"),
    Row("model.sinusoids", "odd", "sinusoids is 'odd'; allowed are scaled and published"),
    Row("model.sinks", "-1", "sinks is -1"),
    Row("model.prior_hidden", "0", "prior_hidden is 0"),
    Row("model.profile_rank", "0", "profile_rank is 0"),
    Row("model.profile_extent", "0", "profile_extent is 0"),
    Row("model.position", "5", "model.position is 5; a word is needed"),
    Row("model.position", "nowhere", "model.position is 'nowhere'; allowed are bam"),
    Row("model.position", "p" * 200, "model.position is 'ppp"),
    Row("model.prior_init", "5", "a word or a list of lists of lists of numbers or null is needed"),
    Row("model.prior_init", "[[[1, -1]]]", "prior_init must be [beta, scale] for each of 4 heads"),
    Row("model.prior_init", "[[[.nan, 1]]]", "model.prior_init is nan; a finite number is needed"),
    Row("model.prior_init", "[" * 40 + "]" * 40, "has deep nesting; at most 12 levels are allowed"),
    Row("model.prior_init", "[" * 40_000, "has deep nesting; at most 12 levels are allowed"),
    *(
        row
        for name in ("prior_epsilon", "temperature_init", "rms_norm_eps", "initializer_range")
        for row in (
            Row(f"model.{name}", "small", f"model.{name} is 'small'; a number is needed"),
            Row(f"model.{name}", "0", f"model.{name} is 0; a positive number is needed"),
            Row(f"model.{name}", ".nan", f"model.{name} is nan; a finite number is needed"),
            Row(f"model.{name}", "1e300", TOO_LARGE),
        )
    ),
    *(
        Row(f"model.{name}", "5", f"model.{name} is 5; true or false is needed")
        for name in (
            "learn_centre", "share_prior", "learned_temperature", "qk_norm", "tie_word_embeddings", "use_cache",
        )
    ),
    Row("model.scale_prior", "5", "model.scale_prior is 5; true or false or null is needed"),
    Row("model.sinks", "-1", "sinks is -1; "),
    Row("model.sinks", "many", "model.sinks is 'many'; a whole number is needed"),
    Row("model.sinusoids", "odd", "sinusoids is 'odd'; allowed are scaled and published"),
    Row("model.sinusoids", "5", "model.sinusoids is 5; a word is needed"),
    Row("model.weight_init", "odd", "weight_init is 'odd'; allowed are normal and published"),
    Row("model.weight_init", "5", "model.weight_init is 5; a word is needed"),
    Row("model.window", "0", "model.window is 0; at least 1 key is needed"),
    Row("model.window", "wide", "model.window is 'wide'; a whole number or a list of whole numbers is needed"),
    Row("model.window", HUGE, TOO_LARGE),
    Row("model.sinks", "-1", "model.sinks is -1; a number of tokens up to 65,536, or 0, is needed"),
    Row("model.sinks", "four", "model.sinks is 'four'; a whole number is needed"),
    Row("model.sinks", HUGE, TOO_LARGE),
    *(
        Row(f"model.{name}", "0", f"model.{name} is 0; it must be at least 1 and at most {most}")
        for name, most in (("prior_hidden", "65,536"), ("profile_rank", "65,536"), ("profile_extent", "16,777,216"))
    ),
    Row("model.sinusoids", "long", "model.sinusoids is 'long'; allowed are scaled and published"),
    Row("model.weight_init", "random", "model.weight_init is 'random'; allowed are normal and published"),
    Row("model.rope_parameters", "5", "model.rope_parameters is 5; a section of settings or null is needed"),
    Row("model.rope_parameters", "{factor: .nan}", "model.rope_parameters.factor is nan; a finite number is needed"),
    Row("model.scalable_softmax", "[1]", "true or false or a word or a list of true or false"),
    Row("model.scalable_softmax", "[true]", "scalable_softmax must be true, false, retrieval, or for each of 3 layers"),
    Row("model.training_length", "9", "model.training_length is given; it is data.context, set that"),
    Row("model.max_position_embeddings", "many", "model.max_position_embeddings is 'many'; a whole number"),
    Row("model.tolerance", "little", "model.tolerance is 'little'; a number is needed"),
    Row("model.tolerance", "1", "model.tolerance is 1; 0 ≤ tolerance < 1 is needed"),
    Row("model.tolerance", ".nan", "model.tolerance is nan; a finite number is needed"),
    Row("model.bos_token_id", "first", "model.bos_token_id is 'first'; a whole number"),
    Row("model.eos_token_id", "last", "model.eos_token_id is 'last'; a whole number"),
    Row("model.pad_token_id", "none", "model.pad_token_id is 'none'; a whole number"),
    Row("model.cross_layers", "1", "model.cross_layers is given and model.type is bam"),
    Row("model.key_delay", "1", "model.key_delay is given and model.type is bam"),
    Row("model.delayed_heads", "[1]", "model.delayed_heads is given and model.type is bam"),
]  # fmt: skip

# The whole text of a file.
FILES = [
    Row("an empty file", b"", "has no settings"),
    Row("an alias bomb", b"a: &a [x, x]\n" + b"b: [*a, *a, *a]\n", "line 2 has an alias"),
    Row("a merge", b"x: &x {seed: 1}\n<<: *x\n", "line 2 has an alias"),
    Row("a key twice", b"seed: 1\nseed: 2\n", "line 2 has the key 'seed' a second time; each is allowed once"),
    Row("a key that is a list", b"? [a, b]\n: 3\n", "line 1 has a key of several values; a word is needed"),
    Row("a key that is a number", b"5: 3\n", "recipe has no setting 5; there are base, name"),
    Row("a long key", b"k" * 200 + b": 3", "recipe has no setting 'kkk"),
    Row("several documents", b"seed: 1\n---\nseed: 2\n", "is not YAML of plain values: line 2: but found another"),
    Row("invalid UTF-8", b"name: \xff\xfe", "is not YAML: it is not text in UTF-8"),
    Row("a NUL", b"name: a\0b", "is not YAML of plain values: unacceptable character #x0000"),
    Row("a base that is no path", b'base: "a\\0b"', "base is 'a\\x00b'; characters that can be printed are needed"),
    Row("a long base", b"base: " + b"b/" * 2040, "the recipe"),
    Row("a base in a file", b"base: mine.yaml/other.yaml", "there is no recipe"),
    Row("binary", bytes(range(256)) * 10, "is not YAML: it is not text in UTF-8"),
    Row("too long", b"# " + b"x" * 100_000, "it has 100,002 characters, and at most 100,000 are allowed"),
    Row("much too long", b"[" * 10_000_000, "it has 400,004 characters, and at most 100,000 are allowed"),
    Row("a word that is no number", b"seed: !!int x", "is not YAML of plain values: invalid literal for int()"),
    Row("a truth that is none", b"seed: !!bool x", "is not YAML of plain values"),
]

CHANGES = [
    Row("--set", "steps", "'steps' is not a change; write section.key=value"),
    Row("--set", "=5", "recipe has no setting ''"),
    Row("--set", "training.=5", "training has no setting ''"),
    Row("--set", "name.first=x", "'name' is a value and not a section"),
    Row("--set", "training.batch=[", "'training.batch=[' is not a change: '[' is not YAML"),
    Row("--set", "model=" + "[" * 50_000, "has deep nesting; at most 12 levels are allowed"),
    Row("--set", ".".join("a" * 5000) + "=1", "has more than 12 levels of sections or lists"),
    Row("--set", "k" * 100_000 + "=1", "at most 4,096 characters are allowed, not 100,000"),
    Row("--set", "training.steps=" + "1" * 200_000, "it has 200,000 characters, and at most 100,000 are allowed"),
    Row("--set", "base=other.yaml", "base is changed to 'other.yaml'; it can be set in the recipe's file only"),
    Row("--set", "name=\udcff", "is not a change"),
]

# Options of a dry run.
OPTIONS = [
    (["--hardware", "abacus"], "there is no hardware 'abacus'"),
    (["--mfu", "nan"], "mfu"),
    (["--mfu", "0"], "at least 1 device and 0 < mfu ≤ 1 are needed"),
    (["--mfu", "1e308"], "at least 1 device and 0 < mfu ≤ 1 are needed"),
    (["--devices", "3"], "a batch of 16 contexts does not divide among 3 devices"),
    (["--set", "training.batch=1000000000000"], "training.batch is 1,000,000,000,000; at most 1,000,000 is allowed"),
    (["--set", "model.dtype=evil"], "model has no setting 'dtype'"),
    (["--json", ".", "--hardware", "abacus"], ". cannot be written: it is a folder"),  # before the work
    (["--set", "model.vocab_size=5"], "model.vocab_size is 5; the tokenizer needs at least 1024"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_setting_that_cannot_be_is_refused_in_a_file_and_as_a_change(
    row: Row, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    tried("bad inputs", 2)
    section, _, key = row.name.rpartition(".")
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"{section}: {{{key}: {row.given}}}\n" if section else f"{row.name}: {row.given}\n")
    check_refused(lambda: load_recipe(mine), row.says)
    mine.write_text("{}")
    says = row.says if row.name != "base" else "base is changed to [1]"
    check_refused(lambda: load_recipe(mine, [f"{row.name}={row.given}"]), says)


@pytest.mark.parametrize("row", FILES, ids=str)
def test_a_file_that_is_no_recipe_is_refused(row: Row, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 1)
    assert isinstance(row.given, bytes)
    (tmp_path / "mine.yaml").write_bytes(row.given)
    check_refused(lambda: load_recipe(tmp_path / "mine.yaml"), row.says)


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: str(row)[:40])
def test_a_change_that_is_none_is_refused(row: Row, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 1)
    (tmp_path / "mine.yaml").write_text("name: mine")
    check_refused(lambda: load_recipe(tmp_path / "mine.yaml", [str(row.given)]), row.says)


def test_every_setting_has_a_row() -> None:
    settings = {field.name for field in dataclasses.fields(Recipe)}
    for section, kind in {"data": Data, "augmentation": Augmentation, "training": Training}.items():
        settings |= {f"{section}.{field.name}" for field in dataclasses.fields(kind)}
    own = {name for kind in (BamConfig, DelayedKeysConfig) for name in kind.__annotations__}
    settings |= {f"model.{name}" for name in own}
    assert settings <= {row.name for row in ROWS}


def test_an_alias_bomb_is_refused_before_it_grows(tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 1)
    lines = ["a0: &a0 lol"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    check_refused(lambda: load_recipe(tmp_path / "bomb.yaml"), "line 2 has an alias; its value is needed in its place")


def test_a_long_chain_of_bases_is_refused(tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 1)
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml")
    check_refused(lambda: load_recipe(tmp_path / "0.yaml"), "at most 16 recipes that build on one another are allowed")


@pytest.mark.parametrize("path", [".", "none.yaml", "a\0b", "mine.yaml/other", "x" * 300, "loop.yaml"])
def test_a_path_that_is_no_file_is_refused(path: str, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 1)
    (tmp_path / "mine.yaml").write_text("name: mine")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / path)
    check_sentence(str(caught.value), "recipe")


def test_nested_settings_are_checked_without_a_file(tried: Callable[[str, int], None]) -> None:
    tried("bad inputs", 3)
    circle: dict[str, object] = {}
    circle["model"] = circle
    check_refused(lambda: parse_recipe(circle), "has more than 12 levels of sections or lists")
    check_refused(lambda: parse_recipe({"name": "x", "training": {"lr": 10**400}}), TOO_LARGE)
    check_refused(lambda: parse_recipe({"name": "x", "training": {"steps": 10**5000}}), TOO_LARGE)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (Recipe, Row("name", 5, "name is 5; a word is needed")),
        (Recipe, Row("seed", "0", "seed is '0'; a whole number is needed")),
        (Data, Row("source", None, "source is None; a word is needed")),
        (Data, Row("facts", (1, 2.5), "facts is [1, 2.5]; a list of whole numbers is needed")),
        (Mixture, Row("context", 0.5, "context is 0.5; a whole number is needed")),
        (Augmentation, Row("temperature_jitter", 2, "temperature_jitter is 2; a list of numbers or null is needed")),
        (Training, Row("steps", "many", "steps is 'many'; a whole number is needed")),
        (Training, Row("betas", (0.9, "x"), "betas is [0.9, 'x']; a list of 2 numbers is needed")),
    ],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_settings_of_the_wrong_type_are_refused_in_python(
    kind: type, row: Row, tried: Callable[[str, int], None]
) -> None:
    tried("bad inputs", 1)
    required = {"name": "mine"} if kind is Recipe else {}
    with pytest.raises(UserError) as refused:
        kind(**required | {row.name: row.given})
    assert str(refused.value) == row.says


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=lambda value: " ".join(value)[:40])
def test_a_dry_run_refuses_in_one_sentence(
    options: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    tried("bad inputs", 1)
    (tmp_path / "mine.yaml").write_text("name: mine")
    check_command_refused(["train", "mine.yaml", "--dry-run", *options], says, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--set", "data.tokenizer=nowhere"], "the tokenizer nowhere is neither a shipped one nor a folder"),
        (["--set", "data.source=nowhere"], "there is no file or folder nowhere"),
        (
            ["--set", "data.source=nowhere", "--set", "data.stream=true", "--set", "data.retrieval_share=0"],
            "there is no file or folder nowhere",
        ),
        (["--set", "start=nowhere"], "start is 'nowhere'; there is no such model to start from"),
        (["--set", "training.device_batch=5"], "a batch of 16 contexts does not divide among 1 devices with 5"),
        (["--set", "training.batch=1000000"], "GB and this machine has"),
        (["--set", "model.hidden_size=524288"], "GB and this machine has"),
        (["--set", "model.hidden_size=4", "--set", "model.vocab_size=16000000"], "GB and this machine has"),
        (["--out", "o" * 300], "File name too long"),
        (
            ["--set", "model.position=window", "--set", "model.window=1000000000000"],
            "at least 1 key is needed, and at most",
        ),
        (["--set", "model.type=delayed_keys", "--set", "model.key_delay=1000000000000"], "a whole number of keys"),
        (
            ["--set", "model.prior_init=[[[1, 1e-300],[1, 1],[1, 1],[1, 1]]]", "--set", "model.share_prior=true"],
            "scale",
        ),
        (["--report-to", "nowhere"], "report_to is 'nowhere'; none, all"),
        (["--out", "mine.yaml"], "mine.yaml"),
        (["--json", ".", "--set", "data.source=nowhere"], ". cannot be written: it is a folder"),
        (["--json", "mine.yaml/log", "--set", "data.source=nowhere"], "mine.yaml/log cannot be written: Not a dir"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_training_refuses_before_it_writes_anything(
    changes: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tried: Callable[[str, int], None],
) -> None:
    tried("bad inputs", 1)
    monkeypatch.setattr("bayesattn.data.tokenizer.hub_answers", lambda: False)
    monkeypatch.setattr("bayesattn.models.loading.hub_answers", lambda: False)
    (tmp_path / "mine.yaml").write_text("name: mine")
    check_command_refused(["train", "mine.yaml", *changes], says, tmp_path, monkeypatch, capsys)
