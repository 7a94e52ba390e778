"""`convert`: a folder in, a folder out, a table of what was done; nothing half-written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bayesattn as ba
from bayesattn.cli import main
from bayesattn.compute import cards
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import load_reader
from tests.adapt.published_models import forward, random_weights, save
from tests.bad_inputs.rows import check_command_refused, check_sentence
from tests.models.alibi.sources import make_source
from tests.models.cases import tokens


@pytest.mark.parametrize("encoding", ["bam_ssmax", "rotary"])
def test_a_run_of_the_authors_becomes_a_folder(encoding: str, tmp_path: Path) -> None:
    weights = random_weights(encoding)
    source = save(tmp_path / "run", encoding, weights)
    result = ba.convert(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert result.model == type(model).__name__ == "BamForCausalLM"
    assert (result.encoding, result.tokens, result.tokenizer) == (encoding, 64, False)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.prior_parameters == (24 if encoding == "bam_ssmax" else 0)
    assert 0 < result.largest_difference < 1e-4
    ids = tokens(1, 9)
    expected = forward(encoding, weights, ids[0].tolist()).float()
    torch.testing.assert_close(model(ids).logits[0], expected, atol=1e-4, rtol=0)
    assert ba.convert(source / "model.pt", tmp_path / "again").largest_difference == result.largest_difference


@pytest.mark.parametrize(("name", "prior"), [("bloom", None), ("mpt", "bam"), ("falcon-rw", "laplace")])
def test_a_model_with_alibi_becomes_a_folder(name: str, prior: str | None, tmp_path: Path) -> None:
    source = make_source(name, vocab_size=1024)
    source.save_pretrained(tmp_path / "source")
    load_tokenizer("tokenizer").save_pretrained(tmp_path / "source")
    result = ba.convert(tmp_path / "source", tmp_path / "out", prior=prior)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    heads, per_head = source.config.num_attention_heads, 2 if prior == "bam" else 1
    assert result.prior_parameters == 2 * heads * per_head
    assert result.largest_difference < 1e-4
    assert bool(result.notes) == name.startswith("falcon")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, source(tokens()).logits, atol=1e-4, rtol=0)
    reader = load_reader(str(tmp_path / "out"))
    assert reader.train_length == {"mpt": 64}.get(name, 2048)
    torch.testing.assert_close(reader.last_logits(tokens(), 3), source(tokens()).logits[:, -3:], atol=1e-4, rtol=0)
    costs = [cards.find(str(tmp_path / folder)).parameters for folder in ("source", "out")]
    assert costs[1] - costs[0] == result.prior_parameters
    assert load_tokenizer(str(tmp_path / "out")).encode("key") == load_tokenizer("tokenizer").encode("key")


def test_slopes_that_transformers_does_not_compute_are_noted(tmp_path: Path) -> None:
    make_source("mpt", attn_config={"alibi_bias_max": 16}).save_pretrained(tmp_path / "source")
    (note,) = ba.convert(tmp_path / "source", tmp_path / "out").notes
    assert "those of its configuration, 16" in note


def test_precision_is_kept(tmp_path: Path) -> None:
    make_source("bloom").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    result = ba.convert(tmp_path / "source", tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.prior.slopes.dtype == torch.float32
    assert result.largest_difference < 1e-4


def test_the_command_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", "bam", random_weights("bam"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bayesattn", "convert", "run", "out", "--json", "out.json"])
    main()
    printed = " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "out.json").read_text())
    assert "model BamForCausalLM encoding bam" in printed
    assert f"parameters {result['parameters']:,}" in printed
    assert f"differ by at most {result['largest_difference']:.1e} on 64 random tokens" in printed


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    weights = random_weights("bam")
    weights["norm.weight"] *= torch.inf
    save(tmp_path / "run", "bam", weights)
    with pytest.raises(UserError, match="not finite"):
        ba.convert(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="not finite"):
        ba.convert(tmp_path / "run", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_sources_and_folders_that_cannot_be_get_one_sentence(tmp_path: Path) -> None:
    save(tmp_path / "run", "bam", random_weights("bam"))
    for source, out, settings, says in (
        ("run", "run", {}, "run is not empty; the name of a new folder is needed"),
        ("run", "run/args.json", {}, "is not empty"),
        ("run", "new", {"prior": "bam"}, "has a prior of its own, so leave it out"),
        ("bam-tiny", "new", {}, "bam-tiny is a bam model; runs of the BAM authors' code and models with ALiBi (bloom"),
        ("no-such", "new", {}, "no-such is neither a shipped model"),
        ("args.json", "new", {}, "is neither a shipped model"),
    ):
        place = tmp_path / source if source in ("run", "no-such", "args.json") else source
        with pytest.raises(UserError) as caught:
            ba.convert(place, tmp_path / out, **settings)  # type: ignore[arg-type]
        check_sentence(str(caught.value), says)
    make_source("bloom").save_pretrained(tmp_path / "bloom")
    with pytest.raises(UserError) as caught:
        ba.convert(tmp_path / "bloom", tmp_path / "new", prior="gaussian")
    check_sentence(str(caught.value), "prior is 'gaussian'; allowed are laplace, bam")


def test_the_command_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", "laplace", random_weights("bam"))
    check_command_refused(["convert", "run", "out"], "position_encoding in", tmp_path, monkeypatch, capsys)
    check_command_refused(["convert", "run", "run"], "is not empty", tmp_path, monkeypatch, capsys)
