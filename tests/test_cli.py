from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import bayesattn
from bayesattn import demo
from bayesattn.cli import SPIN_COUNT, app, errors, wait_briefly
from bayesattn.errors import UserError
from tests.bad_inputs.cases import changed, write

runner = CliRunner()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    yield path
    if isinstance(command, typer.core.TyperGroup):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == bayesattn.__version__


@pytest.mark.parametrize("words", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_help_has_an_example_or_commands_with_whole_summaries(words: tuple[str, ...]) -> None:
    done = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    _, _, listed = done.output.partition("\nCommands:\n")
    assert "..." not in listed
    assert listed or f"Example: bayesattn {' '.join(words)}" in done.output


@pytest.mark.parametrize("lengths", ["", "many", "512,", "10", "-512", "1.5", "512,1000000000"])
def test_lengths_that_make_no_sense_end_with_one_sentence(lengths: str) -> None:
    done = runner.invoke(app, ["bench", "attention", "--lengths", lengths])
    assert isinstance(done.exception, UserError)  # which `main` turns into one sentence and exit code 2
    assert "whole numbers of tokens, at least 64" in str(done.exception)


def test_a_folder_that_cannot_be_made_ends_with_one_sentence(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    command = [sys.executable, "-m", "bayesattn.cli", "bench", "attention", "--lengths", "64", "--out", str(taken)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("bayesattn: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("none.yaml", "there is no recipe"),
        ("mine.yaml", "training has no setting 'step'; did you mean 'steps'?"),
    ],
)
def test_a_recipe_that_cannot_be_followed_ends_with_one_sentence(file: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("training: {step: 3}")
    command = [sys.executable, "-m", "bayesattn.cli", "train", str(tmp_path / file)]
    done = subprocess.run(command, capture_output=True, text=True)
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
        assert isinstance(row["peak_bytes"], int)
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
        assert isinstance(row["peak_bytes"], int)
        assert row["error"] < 1e-4
    assert [row["mix"] for row in result["exponents"]] == ["all local", "half retrieval", "all flat"]
    assert all(row["cache_tokens_per_second"] > 0 for row in result["decode"])
    assert (tmp_path / "long.png").stat().st_size > 10_000


def test_bench_short_writes_what_it_prints(tmp_path: Path) -> None:
    command = ["bench", "short", "--shapes", "2x4x64x8,2x4:2x64x8/2", "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "short.json").read_text())
    assert result["settings"]["shapes"] == ["2x4x64x8", "2x4:2x64x8/2"]
    for row in result["rows"]:
        assert row["shape"] in done.output
        assert f"{row['ratio']:.2f}×" in done.output


def test_bench_step_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bayesattn.studies.bench.step import measure as step

    monkeypatch.setattr(step, "MODELS", {"bam-small": step.MODELS["bam-small"]})
    command = ["bench", "step", "--lengths", "64", "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "step.json").read_text())
    for row in result["steps"]:
        assert f"{row['ratio']:.2f}×" in done.output
    (row,) = result["generate"]
    assert f"{row['tokens_per_second']:,.0f}" in done.output


def test_bench_load_writes_what_it_prints(tmp_path: Path) -> None:
    command = ["bench", "load", "--tries", "1", "--seconds", "0.1", "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "load.json").read_text())
    for row in result["attention"]:
        assert f"{row['slow_down']:.1f}×" in done.output
    for row in result["trainings"]:
        assert row["model"] in done.output
        assert f"{min(row['shares']):.2f} … {max(row['shares']):.2f}" in done.output


def test_bench_conditioned_writes_what_it_prints(tmp_path: Path) -> None:
    command = ["bench", "conditioned", "--lengths", "64", "--training", "64", "--no-memory", "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "conditioned.json").read_text())
    assert len(result["rows"]) == 2 * len({row["prior"] for row in result["rows"]})
    for row in result["rows"]:
        assert row["prior"] in done.output
        assert f"{row['ratio']:.2f}×" in done.output
        assert row["peak_bytes"] is None
    assert [row["layer"] for row in result["inkling"]] == ["full", "sliding"]
    for row in result["inkling"]:
        assert f"{row['seconds'] / row['peer_seconds']:.2f}×" in done.output


def test_priors_are_shown_and_drawn(tmp_path: Path) -> None:
    done = runner.invoke(app, ["priors", "--tokens", "256", "--out", str(tmp_path)], env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    for text in ("aggressive retrieval", "effective", "KERPLE", "slope 0.25"):
        assert text in done.output
    assert (tmp_path / "priors.png").stat().st_size > 10_000


@pytest.mark.parametrize("haystack", ["", __file__], ids=["bland", "text"])
def test_demo_measures_retrieval_and_draws_it(haystack: str, tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    demo.demo(tmp_path, console, haystack=haystack, trials={1: 4, 4: 2})
    output = console.export_text()
    for text in ("bam-tiny", "51%…100%", "512", "retrieval", "layer 3", "Next:"):
        assert text in output
    assert ("bam-small" in output) == bool(haystack)
    for picture in ("passkey.png", "priors.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def test_demo_trains_first_on_request(tmp_path: Path) -> None:
    console = Console(width=120, record=True)
    changes = ("training.steps=2", "training.evaluate_every=0")
    demo.demo(tmp_path, console, train=True, trials={1: 2}, recipe_changes=changes)
    assert "bam-tiny, new" in console.export_text()
    assert (tmp_path / "train" / "model" / "model.safetensors").exists()


def test_the_demo_command_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, dict[str, object]]] = []
    monkeypatch.setattr(demo, "demo", lambda out, console, **options: calls.append((out, options)))
    done = runner.invoke(app, ["demo", "--haystack", "a.txt", "--train", "--seed", "3", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert calls == [(tmp_path, {"haystack": "a.txt", "train": True, "seed": 3})]


def test_eval_passkey_writes_what_it_prints_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "passkey.json"
    command = [
        "eval",
        "passkey",
        "bam-tiny",
        "--trials",
        "4",
        "--seed",
        "1",
        "--json",
        str(file),
        "--out",
        str(tmp_path),
    ]
    done = runner.invoke(app, [*command, "--lengths", "1x,300"])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert (result["model"], result["train_length"]) == ("bam-tiny", 128)
    assert [cell["length"] for cell in result["cells"]] == [128, 300]
    for cell in result["cells"]:
        assert (cell["trials"], cell["correct"], cell["accuracy"], cell["high"]) == (4, 4, 1.0, 1.0)
        assert 0.5 < cell["low"] < 0.52
        assert cell["seconds"] > 0
    done = runner.invoke(app, [*command, "--lengths", "2x"])
    assert [cell["length"] for cell in json.loads(file.read_text())["cells"]] == [128, 256, 300]
    for picture in ("passkey.png", "depths.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bam-tiny", "--lengths", "3y"], "'3y'; give numbers of tokens, or multiples of the training length"),
        (["bam-tiny", "--budget", "10"], "'10'; give a time such as 90s, 10m or 2h"),
        (["bam-tiny", "--depths", "x"], "'x'; a whole number from 1 to 1000 is needed"),
        (["bam-tiny", "--wording", "odd"], "the wording is 'odd'"),
        (["no-such-folder/model"], "is neither a shipped model"),
        (["bam-tiny", "--lengths", "99999999999"], "tokens would fit"),
    ],
)
def test_evaluations_that_make_no_sense_end_with_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bayesattn.cli", "eval", "passkey", *arguments, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_perplexity_inspect_and_compare_write_what_they_print(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    for by in ("context", "position"):
        command = ["eval", "perplexity", "bam-tiny", "--lengths", "0,2x,4x", "--windows", "4", "--by", by]
        kept = tmp_path / f"{by}.json"
        done = runner.invoke(app, [*command, "--json", str(kept), *out], env={"COLUMNS": "120"})
        assert done.exit_code == 0, done.output
        result = json.loads(kept.read_text())
        assert result["models"][0]["model"] == "bam-tiny"
        assert 10 < result["models"][0]["rows"][0]["perplexity"] < 60
        assert "do not lower the loss by more than chance" in done.output
    done = runner.invoke(app, ["inspect", "bam-tiny", "--tokens", "128", *out], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    for text in ("aggressive retrieval", "Kullback", "pruning cache"):
        assert text in done.output
    assert len(json.loads((tmp_path / "inspect.json").read_text())["heads"]) == 12
    for trials in ("2", "3"):
        file = str(tmp_path / f"{trials}.json")
        runner.invoke(app, ["eval", "passkey", "bam-tiny", "--lengths", "1x", "--trials", trials, "--json", file, *out])
    files = [str(tmp_path / "2.json"), str(tmp_path / "3.json")]
    done = runner.invoke(app, ["compare", *files, "--json", str(tmp_path / "c.json"), *out], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    assert "cannot tell" in done.output
    assert json.loads((tmp_path / "c.json").read_text())["rows"][0]["difference"] == 0
    for picture in ("perplexity.png", "priors.png", "posteriors.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def test_savings_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "savings.json"
    done = runner.invoke(
        app,
        ["savings", "--model", "llama-3.1-405b", "--json", str(file), "--out", str(tmp_path)],
        env={"COLUMNS": "120"},
    )
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert round(result["parameters"] / 1e9, 2) == 405.85
    long = result["stages"][1]
    assert (long["tokens"], long["length"]) == (100e9, 131_072)
    assert [round(100 * long[key], 2) for key in ("share_full", "share_causal")] == [1.42, 1.06]
    assert round(100 * long["share_blog"], 3) == 63.054
    for text in ("63.054%", "1.06%", "read a token"):
        assert text in done.output
    assert (tmp_path / "savings.png").stat().st_size > 10_000
    command = [sys.executable, "-m", "bayesattn.cli", "savings", "--schedule", "15T@8K,oops"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "cannot be read from character 8 on" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "field"),
    [
        ("gaussian --lengths 256-1024 --points 4 --replicates 8 --number 2 --dimension 8 --dense", "", "slope_cov_se"),
        ("sphere --lengths 256-1024 --points 4 --replicates 8 --number 2 --dimension 8", "", "slope_mean"),
        ("mixture --lengths 256-1024 --points 4 --replicates 8 --number 2 --dimension 8 --dense", "", "horizon"),
        ("uniform --lengths 64-256 --points 3 --replicates 8 --radii 1,2,3 --dimension 3", "-uniform", "constant"),
        ("hardmax --lengths 64-256 --points 3 --replicates 8 --law sphere", "-hardmax", "preferred"),
        ("model bam-tiny --tokens 128 --replicates 8 --sampling window", "-model", "slope_mean_se"),
        ("prior --lengths 10-300 --points 3 --replicates 8", "-prior", "ratio"),
    ],
)
def test_convergence_writes_what_it_prints(arguments: str, kind: str, field: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = ["convergence", *arguments.split(), "--json", str(file), "--out", str(tmp_path)]
    done = runner.invoke(app, command, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "seed 0" in done.output
    assert "…" not in done.output.replace(" … ", "")  # no column is cut off
    result = json.loads(file.read_text())
    assert result["kind"] == f"convergence{kind}"
    assert all(field in row for row in result["rows"])
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("convergence gaussian --replicates 3", "3 replicates are too few for a fit; at least 8 are needed"),
        ("convergence gaussian --lengths 5000", "give two numbers of tokens such as 1000-30000"),
        ("convergence gaussian --lengths 500-100", "the lengths are 500 to 100; the first must be smaller"),
        ("convergence gaussian --scales 3", "give two positive numbers such as 0.05-50"),
        ("convergence uniform --law cube", "'cube' is not one of 'gaussian', 'sphere', 'mixture'"),
        ("convergence hardmax --sharpness 0", "give positive numbers with commas between them"),
        (
            "convergence model bam-tiny --tokens 64 --lengths 16-100",
            "the longest sample has 100 tokens; at most the 64 of the text",
        ),
        ("advise bam-tiny --delta 5 --length 128", "delta is 5.0; it must be at least 1e-6 and less than 2"),
        ("advise bam-tinny", "bam-tinny is neither a shipped model"),
    ],
)
def test_convergence_and_advise_refuse_bad_input_with_one_sentence(arguments: str, sentence: str) -> None:
    done = runner.invoke(app, arguments.split(), env={"COLUMNS": "200"})
    # `main` turns a UserError into exit code 2; the runner calls the app without it.
    assert done.exit_code == 2 or isinstance(done.exception, UserError)
    assert sentence in (done.output + str(done.exception))


def test_advise_writes_what_it_prints(tmp_path: Path) -> None:
    done = runner.invoke(app, ["advise", "bam-tiny", "--length", "512", "--out", str(tmp_path)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "use all 512, and try more" in done.output.replace("\n", " ")
    assert json.loads((tmp_path / "advise.json").read_text())["usable"] == 512


def test_names_with_brackets_and_colons_are_printed_as_they_are(tmp_path: Path) -> None:
    files = []
    for name in ("[/x] :smile:", "[red]"):
        files.append(write(tmp_path / f"{len(files)}.json", "passkey", changed("passkey", "model", name)))
    done = runner.invoke(app, ["compare", *map(str, files), "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    assert "[/x] :smile:" in done.output
    assert "[red]" in done.output


def test_threads_wait_briefly_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
        monkeypatch.delenv("GOMP_SPINCOUNT")
        wait_briefly()
        assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
        monkeypatch.delenv("GOMP_SPINCOUNT")
        monkeypatch.setenv(name, "17")
        wait_briefly()
        assert os.environ.get("GOMP_SPINCOUNT") == ("17" if name == "GOMP_SPINCOUNT" else None)


@pytest.mark.parametrize(("module", "extra"), [("yaml", "demo"), ("transformers", "demo"), ("accelerate", "train")])
def test_a_missing_module_is_named_with_the_extra_that_has_it(module: str, extra: str) -> None:
    said = errors.sentence(ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert said == f"No module named '{module}'; this command needs {module}: pip install 'bayesattn[{extra}]'"
