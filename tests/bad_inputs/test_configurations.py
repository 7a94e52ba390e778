"""Settings of a model's configuration that cannot be: in Python, and in the config.json of a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bayesattn as ba
from tests.bad_inputs.rows import Row, check_refused, rows
from tests.models.cases import make

Tried = Callable[[str, int], None]
NAN, INF, HUGE = float("nan"), float("inf"), 10**400
WHOLE = "a whole number"
NUMBER = "a number is needed"
POSITIVE = "a positive number is needed"
BELOW_ONE = "0 ≤ tolerance < 1"
VOCABULARY = "tokens are from 0 to 63"
HEADS = "true or false or a word or a list of true or false"

ROWS = [
    *rows(
        "vocab_size hidden_size num_hidden_layers num_attention_heads training_length "
        "intermediate_size num_key_value_heads head_dim max_position_embeddings prior_hidden profile_rank "
        "profile_extent",
        ("8", WHOLE),
        (1.5, WHOLE),
        ([8], WHOLE),
        (True, WHOLE),
        (NAN, WHOLE),
        (0, "at least 1"),
        (-4, "at least 1"),
        (2**62, "at most"),
        (HUGE, "at most"),
    ),
    *rows("sinks", *((value, WHOLE) for value in ("4", 1.5, [4], True, NAN, INF))),
    *rows("sinks", *((value, "a number of tokens up to 65,536, or 0, is needed") for value in (-1, 2**17, HUGE))),
    *rows(
        "vocab_size hidden_size num_hidden_layers num_attention_heads training_length prior_hidden profile_rank sinks",
        (None, WHOLE),
    ),
    *rows("hidden_size", (30, "does not divide by 4 heads")),
    *rows("num_key_value_heads", (3, "the latter must divide the former")),
    *rows(
        "prior_epsilon temperature_init rms_norm_eps initializer_range",
        ("small", NUMBER),
        (None, NUMBER),
        ([1.0], NUMBER),
        (True, NUMBER),
        (0, POSITIVE),
        (-1.0, POSITIVE),
        (NAN, POSITIVE),
        (INF, POSITIVE),
        (1e-300, POSITIVE),
        (1e300, POSITIVE),
        (HUGE, POSITIVE),
    ),
    *rows(
        "learn_centre share_prior learned_temperature scale_prior qk_norm tie_word_embeddings use_cache",
        ("true", "true or false"),
        (1, "true or false"),
        ([True], "true or false"),
    ),
    *rows(
        "learn_centre share_prior learned_temperature qk_norm tie_word_embeddings use_cache", (None, "true or false")
    ),
    *rows(
        "bos_token_id pad_token_id eos_token_id",
        ("end", WHOLE),
        (1.5, WHOLE),
        (-1, VOCABULARY),
        (64, VOCABULARY),
        (HUGE, VOCABULARY),
    ),
    *rows("eos_token_id", ([1, "end"], "a list of whole numbers"), ([1, -1], VOCABULARY)),
    *rows(
        "position",
        ("nowhere", "allowed are bam, alibi"),
        ("x" * 10_000, "allowed are bam, alibi"),
        (3, "a word is needed"),
        (None, "a word is needed"),
    ),
    *rows(
        "prior_init",
        ("ones", "allowed are zeros"),
        (5, "a word or a list"),
        ([[["a", 1.0]]], "a word or a list"),
        ([], "for each of 4 heads"),
        ([[[1.0, 2.0]]], "for each of 4 heads"),
        ([[[NAN, 1.0]] * 4] * 2, "a beta of prior_init is nan"),
        ([[[1e9, 1.0]] * 4] * 2, "a beta of prior_init"),
        ([[[1.0, 0.0]] * 4] * 2, "a scale of prior_init is 0.0"),
        ([[[1.0, INF]] * 4] * 2, "a scale of prior_init is inf"),
        ([[[1.0, HUGE]] * 4] * 2, "a scale of prior_init"),
    ),
    *rows(
        "window",
        (0, "at least 1 key"),
        (-5, "at least 1 key"),
        ([1, 2, 3, 0], "at least 1 key"),
        (HUGE, "at most 16,777,216"),
        ("8", "a whole number or a list"),
        (1.5, "a whole number or a list"),
        ([], "0 numbers and the model 4 heads"),
        ([16, 32], "2 numbers and the model 4 heads"),
    ),
    *rows(
        "scalable_softmax",
        ("yes", "the only word allowed is retrieval"),
        (1, HEADS),
        ([1, 0], HEADS),
        ([True], "for each of 2 layers"),
        ([[True], [False]], "for each of 2 layers"),
    ),
    *rows(
        "tolerance",
        (1.0, BELOW_ONE),
        (-0.1, BELOW_ONE),
        (NAN, BELOW_ONE),
        (HUGE, BELOW_ONE),
        ("small", NUMBER),
        (None, NUMBER),
    ),
    *rows(
        "rope_parameters",
        ("yarn", "a section of settings"),
        ([1], "a section of settings"),
        ({"rope_tpye": "yarn"}, "did you mean 'rope_type'"),
        ({"rope_type": 3}, "rope_type of rope_parameters is 3; a word"),
        ({"rope_type": "none", "rope_theta": 1e4}, "rope_type is 'none'"),
        ({"rope_theta": 0}, POSITIVE),
        ({"rope_theta": NAN}, POSITIVE),
        ({"rope_theta": None}, POSITIVE),
        ({"rope_theta": HUGE}, POSITIVE),
        ({"rope_theta": "10000"}, POSITIVE),
        ({"factor": 0.5}, "a number of at least 1"),
        ({"factor": INF}, "a number of at least 1"),
        ({"beta_fast": "a"}, POSITIVE),
        ({"mscale": [1]}, POSITIVE),
        ({"truncate": 1}, "true or false"),
        ({"short_factor": 2.0}, "a list of numbers"),
        ({"long_factor": ["a"]}, "a list of numbers"),
        ({"original_max_position_embeddings": 0.5}, "a positive whole number"),
    ),
    *rows(
        "dtype torch_dtype",
        ("evil", "the name of a floating-point type"),
        ("int64", "the name of a floating-point type"),
        ("nn", "the name of a floating-point type"),
    ),
    *rows("positon", ("rope", "did you mean 'position'")),
    *rows("hidden_sizes", (128, "did you mean 'hidden_size'")),
    *rows(
        "weight_init", ("odd", "allowed are normal and published"), (None, "a word is needed"), (1, "a word is needed")
    ),
    *rows(
        "sinusoids", ("odd", "allowed are scaled and published"), (None, "a word is needed"), (1, "a word is needed")
    ),
    *rows("crowd", (3, "is of an earlier version")),
    *rows("key_delay", (3, "is a setting of DelayedKeysConfig")),
]

DELAYED_ROWS = [
    *rows("cross_layers key_delay", ("1", WHOLE), (1.5, WHOLE), (None, WHOLE), (True, WHOLE), (NAN, WHOLE)),
    *rows("cross_layers", (0, "1 to 2 (all layers)"), (3, "1 to 2 (all layers)"), (HUGE, "1 to 2 (all layers)")),
    *rows("key_delay", (-1, "a number of tokens is needed"), (HUGE, "a number of tokens is needed")),
    *rows(
        "delayed_heads",
        ([4], "from 0 to 3"),
        ([-1], "from 0 to 3"),
        ([HUGE], "from 0 to 3"),
        ([1, 1], "different key/value heads"),
        ([], "different key/value heads"),
        ([1.5], "a list of whole numbers"),
        (1, "a list of whole numbers"),
        ("0", "a list of whole numbers"),
    ),
    *rows("position", ("rope", "bam is needed")),
]

LAYOUT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "training_length": 16}


def position_for(name: str) -> str:
    """The encoding for which a setting matters."""
    return {"window": "window", "rope_parameters": "rope", "max_position_embeddings": "rope"}.get(name, "bam")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_setting_of_a_model_is_refused_in_one_sentence(row: Row, tried: Tried) -> None:
    settings = {**LAYOUT, "position": position_for(row.name), row.name: row.given}
    check_refused(lambda: ba.BamConfig(**settings), row.says)
    tried("bad inputs", 1)


@pytest.mark.parametrize("row", DELAYED_ROWS, ids=str)
def test_a_setting_of_a_model_with_delayed_keys_is_refused_in_one_sentence(row: Row, tried: Tried) -> None:
    settings = {**LAYOUT, "key_delay": 2, row.name: row.given}
    check_refused(lambda: ba.DelayedKeysConfig(**settings), row.says)
    tried("bad inputs", 1)


def test_every_setting_has_rows() -> None:
    for config, table in ((ba.BamConfig, ROWS), (ba.DelayedKeysConfig, DELAYED_ROWS)):
        declared = {
            name for name in config.__annotations__ if name in {field.name for field in dataclasses.fields(config)}
        }
        assert declared <= {row.name for row in table}


def test_a_setting_that_is_changed_later_is_checked_too() -> None:
    config = make().config
    check_refused(lambda: setattr(config, "vocab_size", "many"), "vocab_size is 'many'; a whole number is needed")
    assert config.vocab_size == make().config.vocab_size


IN_A_FOLDER = [row for row in ROWS if row.given is not None and not isinstance(row.given, torch.dtype)][::7]


@pytest.mark.parametrize("row", IN_A_FOLDER, ids=str)
def test_a_folder_with_such_a_setting_is_refused_in_one_sentence(row: Row, tmp_path: Path, tried: Tried) -> None:
    ba.BamForCausalLM(ba.BamConfig(**LAYOUT, scalable_softmax=True)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = {**json.loads(file.read_text()), "position": position_for(row.name), row.name: row.given}
    file.write_text(json.dumps(content))
    check_refused(lambda: ba.load_model(tmp_path), "")
    check_refused(lambda: ba.BamForCausalLM.from_pretrained(tmp_path), row.says)
    tried("bad inputs", 2)
