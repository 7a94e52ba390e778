from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bayesattn
from bayesattn.cli import app

runner = CliRunner()


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == bayesattn.__version__
    for command in ([], ["demo"], ["bench"], ["bench", "attention"], ["bench", "long"], ["train"]):
        done = runner.invoke(app, [*command, "--help"])
        assert done.exit_code == 0
    assert "Example: bayesattn bench attention" in runner.invoke(app, ["bench", "attention", "--help"]).output


@pytest.mark.parametrize("lengths", ["", "many", "512,", "10", "-512", "1.5", "512,1000000000"])
def test_lengths_that_make_no_sense_end_with_one_sentence(lengths: str) -> None:
    done = runner.invoke(app, ["bench", "attention", "--lengths", lengths])
    assert done.exit_code == 2
    assert "whole numbers of tokens, at least 64" in " ".join(done.output.split())


def test_a_folder_that_cannot_be_made_ends_with_one_sentence(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    command = [sys.executable, "-m", "bayesattn.cli", "bench", "attention", "--lengths", "64", "--out", str(taken)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("bayesattn: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_recipe_that_cannot_be_followed_ends_with_one_sentence(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("training: {step: 3}")
    command = [sys.executable, "-m", "bayesattn.cli", "train"]
    for arguments, sentence in (
        ([str(tmp_path / "none.yaml")], "there is no recipe"),
        ([str(recipe)], "training has no setting 'step'; did you mean 'steps'?"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("bayesattn: ")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_bench_attention_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = runner.invoke(
        app,
        ["bench", "attention", "--lengths", "64", "--no-flex", "--json", str(file), "--out", str(tmp_path)],
    )
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["settings"]["seed"] == 0
    assert {row["tokens"] for row in result["rows"]} == {64}
    for row in result["rows"]:
        assert row["seconds"] > 0
        assert row["error"] is None or row["error"] < 1e-4
        assert row["peak_bytes"] >= 0
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    assert (tmp_path / "attention.svg").exists()


def test_bench_long_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    command = ["bench", "long", "--lengths", "512,1024", "--decode", "300", "--json", str(file), "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.output
    result = json.loads(file.read_text())
    assert result["settings"]["tolerance"] == 1e-6
    assert {(row["mix"], row["tokens"]) for row in result["rows"]} == {
        (mix, tokens) for mix in ("all local", "half retrieval", "all flat") for tokens in (512, 1024)
    }
    for row in result["rows"]:
        assert row["dense_seconds"] > 0
        assert row["pruned_seconds"] > 0
        assert 0 < row["kept"] <= 1
        assert row["peak_bytes"] >= 0
        assert row["error"] < 1e-4
    assert [row["mix"] for row in result["exponents"]] == ["all local", "half retrieval", "all flat"]
    assert all(row["cache_tokens_per_second"] > 0 for row in result["decode"])
    assert (tmp_path / "long.png").stat().st_size > 10_000


def test_demo_prints_both_tables_and_draws_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesattn.demo.BENCH_TOKENS", 128)
    done = runner.invoke(app, ["demo", "--out", str(tmp_path)], env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    for text in ("aggressive retrieval", "effective", "plain SDPA", "dense autograd"):
        assert text in done.output
    assert (tmp_path / "priors.png").stat().st_size > 10_000
