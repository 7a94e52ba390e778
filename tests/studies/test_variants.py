"""Results of several variants and seeds in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.report.page import make_page
from bayesattn.studies.results import write_results
from bayesattn.studies.variants.run import Variants, gather, split_name
from bayesattn.studies.variants.show import figures, markdown, plain_tables, tables
from tests.bad_inputs.cases import RESULTS
from tests.studies.test_history import LOG, write_log

PASSKEY = {
    "wording": "standard", "haystack": "bland", "digits": 5, "teacher_forced": False, "seed": 0, "depths": None,
}  # fmt: skip


def passkey(file: Path, name: str, right: dict[int, int], trials: int = 20, **settings: Any) -> None:
    cells = [
        Cell(n, tuple((0.5, float(trial < k)) for trial in range(trials)), seconds=n * trials / 1000, planned=trials)
        for n, k in right.items()
    ]
    content = {"model": f"runs/lp/{name}/model", "train_length": 128, "settings": PASSKEY | settings}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_results(file, "passkey", {**content, "cells": [cell.to_dict() for cell in cells]})


def perplexity(file: Path, *names: str) -> None:
    of = RESULTS["perplexity"]
    models = [{**of["models"][0], "model": f"runs/lp/{name}/model"} for name in names]
    write_results(file, "perplexity", {**of, "models": models})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three seeds of one variant, one of another, in folders and beside them."""
    for seed, right in enumerate(({128: 20, 2048: 20}, {128: 19, 2048: 18}, {128: 20, 2048: 7})):
        passkey(tmp_path / f"zeros-{seed}" / "bland.json", f"zeros-{seed}", right)
    passkey(tmp_path / "zeros-0" / "text.json", "zeros-0", {2048: 3}, haystack="text")
    passkey(tmp_path / "placed.json", "placed-0", {128: 5}, trials=10)
    perplexity(tmp_path / "perplexity.json", "zeros-0", "placed-0")
    write_log(tmp_path / "zeros-0", LOG)
    write_log(tmp_path / "zeros-0" / "model", LOG)
    return tmp_path


def cells(result: Variants, start: str) -> list[list[str]]:
    return next(rows for title, _, rows in plain_tables(result) if title.startswith(start))


def test_seeds_of_a_variant_stand_side_by_side_with_one_interval(folder: Path) -> None:
    result = gather(folder)
    assert [(run.variant, run.seed) for run in result.runs] == [("placed", 0), ("zeros", 0), ("zeros", 1), ("zeros", 2)]
    assert cells(result, "Pass keys: standard wording, bland") == [
        ["placed (0)", "5 of 10 (24–76)", "–"],
        ["zeros (0, 1, 2)", "20, 19, 20 of 20 (91–100)", "20, 18, 7 of 20 (63–84)"],
    ]
    assert cells(result, "Pass keys: standard wording, text")[1] == ["zeros (0, 1, 2)", "3 of 20 (5–36)"]
    assert cells(result, "Perplexity on bundled")[0] == ["placed (0)", "25.0 (20.0–30.0)", "25.0 (20.0–30.0)"]
    assert cells(result, "Seconds a prompt: standard wording, bland")[1] == ["zeros (0, 1, 2)", "128 ms", "2.0 s"]


def test_runs_of_an_earlier_result_are_kept_unless_they_are_measured_again(folder: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    write_results(before, "variants", gather(folder).to_dict())
    again = tmp_path / "again"
    passkey(again / "zeros-0.json", "zeros-0", {128: 1})
    result = gather(again, earlier=before)
    assert [(run.name, len(run.cells)) for run in result.runs] == [
        ("placed-0", 1), ("zeros-0", 1), ("zeros-1", 2), ("zeros-2", 2)
    ]  # fmt: skip
    assert result.runs[1].cells[0].right == 1
    with pytest.raises(UserError, match="a result of variants is needed"):
        gather(again, earlier=again / "zeros-0.json")


def test_heads_come_from_the_log_of_the_run(folder: Path) -> None:
    result = gather(folder)
    assert [run.steps for run in result.runs] == [None, 50, None, None]
    assert cells(result, "Heads")[1] == ["zeros, seed 0", "0.30, 0.10", "0.20, −0.70", "1"]
    assert cells(result, "Heads")[0] == ["placed, seed 0", "–", "–", "–"]


def test_the_tables_are_written_in_markdown_and_shown_on_the_page(folder: Path, tmp_path: Path) -> None:
    result = gather(folder)
    (file,) = figures(result, tmp_path / "out")
    assert file.read_text() == markdown(result)
    assert "| variant (seeds) | 128 (1×) | 2,048 (16×) |\n| --- | ---: | ---: |\n" in markdown(result)
    write_results(tmp_path / "out" / "variants.json", "variants", result.to_dict())
    assert "zeros (0, 1, 2)" in make_page([tmp_path / "out" / "variants.json"])
    with (tmp_path / "shown").open("w") as shown:
        Console(width=80, file=shown).print(*tables(result))
    assert max(map(len, (tmp_path / "shown").read_text().splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("zeros-1", ("zeros", 1)), ("no-jitter-seed2", ("no-jitter", 2)), ("spread_seed_0", ("spread", 0)),
        ("zeros-s1", ("zeros", 1)), ("placed-s0-numbers8", ("placed-numbers8", 0)), ("no-stop", ("no-stop", None)),
        ("bam-tiny", ("bam-tiny", None)), ("3", ("3", None)),
    ],
)  # fmt: skip
def test_the_name_of_a_run_ends_with_its_seed(name: str, parts: tuple[str, int | None]) -> None:
    assert split_name(name) == parts


def test_a_measurement_that_is_there_twice_is_an_error(folder: Path) -> None:
    passkey(folder / "again.json", "zeros-1", {128: 2})
    with pytest.raises(UserError, match=r"and another file have results of zeros-1 for .* at 128 tokens; keep one"):
        gather(folder)


def test_other_results_alone_are_an_error(tmp_path: Path) -> None:
    write_results(tmp_path / "inspect.json", "inspect", RESULTS["inspect"])
    with pytest.raises(UserError, match="has no results of eval passkey or eval perplexity"):
        gather(tmp_path)
