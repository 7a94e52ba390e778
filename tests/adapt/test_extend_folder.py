"""`bayesattn extend`, models named with a suffix, and our own rotary models as models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bayesattn as ba
from bayesattn.adapt.extend_folder import extend_folder
from bayesattn.adapt.rope_models import as_transformers
from bayesattn.cli import app
from bayesattn.errors import UserError
from bayesattn.evaluation.passkey import Task
from bayesattn.evaluation.reader import load_reader
from bayesattn.evaluation.trials import measure
from tests.bad_inputs.rows import check_refused


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1024, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", [{}, {"qk_norm": False, "learned_temperature": False}, {"scalable_softmax": True}])
def test_our_rotary_models_are_models_of_transformers_too(settings: dict[str, Any]) -> None:
    sizes = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ba.BamForCausalLM(ba.BamConfig(**sizes, position="rope", num_key_value_heads=2, **settings)).eval()
    torch.testing.assert_close(as_transformers(model)(tokens(40)).logits, model(tokens(40)).logits, atol=1e-4, rtol=0)
    check_refused(
        lambda: as_transformers(ba.BamForCausalLM(ba.BamConfig(**sizes))), "only rotary positions can be extended"
    )


def test_a_folder_is_written_that_any_evaluation_reads(tmp_path: Path) -> None:
    made = extend_folder("rope-tiny", tmp_path / "out", window=64)
    assert (made.train_length, made.window, made.tokens, made.layers, made.tokenizer) == (128, 64, 64, (0, 1, 2), True)
    assert made.largest_difference < 1e-4
    reader, named = load_reader(str(tmp_path / "out")), load_reader("rope-tiny+clip:64")
    assert reader.train_length == named.train_length == 128
    assert named.fingerprint not in (load_reader("rope-tiny").fingerprint, load_reader("rope-tiny+clip:32").fingerprint)
    torch.testing.assert_close(reader.last_logits(tokens(200), 9), named.last_logits(tokens(200), 9))


def test_the_command_says_what_was_done(tmp_path: Path) -> None:
    file = tmp_path / "extended.json"
    options = ["--window", "100", "--group", "32", "--temperature", "none", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["extend", "rope-tiny", *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    content = json.loads(file.read_text())
    assert (content["group"], content["temperature"], content["model"]) == (32, None, "Qwen3ForCausalLMWithPrior")
    assert "in steps of 32 tokens" in done.output


def test_a_model_that_is_not_extended_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="window is 128; the model was trained to 128 tokens"):
        extend_folder("rope-tiny", tmp_path / "out", window=128)
    assert not any(tmp_path.iterdir())


def test_an_extended_model_finds_keys_where_the_model_as_it_is_finds_none() -> None:
    """rope-tiny was trained to 128 tokens; the keys are in 1,024."""
    extended, plain = (measure(load_reader(name), Task(), 1024, 5) for name in ("rope-tiny+clip:64", "rope-tiny"))
    assert (extended.right, plain.right) == (5, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rope-tiny+clip:128", "so a whole number from 1 to 127 is needed"),
        ("rope-tiny+clip:0.5", "are allowed, such as +yarn:16, or +clip:TOKENS"),
        ("rope-tiny+clip:", "+clip:TOKENS"),
        ("bam-tiny+clip:64", "only rotary positions can be extended, and priors read on by themselves"),
    ],
)
def test_suffixes_that_cannot_be_are_refused(name: str, words: str) -> None:
    check_refused(lambda: ba.load_model(name), words)
