from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.intervals import newcombe
from bayesattn.studies.compare.run import compare, difference_of_means, scores_needed, trials_needed
from bayesattn.studies.compare.show import comparison_table
from bayesattn.studies.results import write_results


def results(file: Path, model: str, shares: dict[int, tuple[int, int]], note: str = "", **settings: object) -> Path:
    """Right and trials by length; a length without trials has the note."""
    cells = [
        Cell(n, tuple((0.5, t < right) for t in range(of)), planned=of, note="" if of else note).to_dict()
        for n, (right, of) in shares.items()
    ]
    settings = {
        "wording": "standard", "haystack": "bland", "digits": 5, "teacher_forced": False, "seed": 0, "depths": None,
    } | settings  # fmt: skip
    write_results(file, "passkey", {"model": model, "train_length": 128, "settings": settings, "cells": cells})
    return file


def needles(file: Path, model: str, scores: dict[str, dict[int, list[float]]]) -> Path:
    """By task and length, all tasks in one file."""
    cells = [
        Cell(n, tuple((0.0, score) for score in some), task=task).to_dict()
        for task, lengths in scores.items()
        for n, some in lengths.items()
    ]
    settings = {"name": ",".join(scores), "seed": 0, "depths": None}
    write_results(file, "needle", {"model": model, "train_length": 128, "settings": settings, "cells": cells})
    return file


def test_verdicts_differences_and_trials(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", "a", {128: (50, 100), 512: (50, 100), 2048: (50, 100), 8192: (1, 2)})
    second = results(tmp_path / "b.json", "b", {128: (90, 100), 512: (10, 100), 2048: (55, 100)}, seed=1)
    better, worse, unclear = compare([first, second])
    assert (better.verdict, worse.verdict, unclear.verdict) == ("better", "worse", "cannot tell")
    assert better.difference == pytest.approx(0.4)
    assert better.low is not None
    assert better.high is not None
    assert better.low < 0.4 < better.high
    assert unclear.needed is not None
    assert 1500 < unclear.needed < 1600
    assert trials_needed(0.5, 0.5) is None


def test_intervals_of_differences_are_the_published_ones_and_cover() -> None:
    # Newcombe (1998), table II, method 10
    assert newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert newcombe(9, 10, 3, 10) == pytest.approx((0.1705, 0.8090), abs=1e-4)
    generator = torch.Generator().manual_seed(0)
    first = (torch.rand(2000, 80, generator=generator) < 0.9).sum(1).tolist()
    second = (torch.rand(2000, 60, generator=generator) < 0.7).sum(1).tolist()
    covered = sum(
        low <= 0.2 <= high for low, high in (newcombe(a, 80, b, 60) for a, b in zip(first, second, strict=True))
    )
    assert 0.93 <= covered / 2000 <= 0.97


def test_lengths_that_were_not_tried_are_listed_with_the_reason(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", "a", {512: (0, 20), 8192: (0, 0)}, note="not tried: none right at 512")
    second = results(tmp_path / "b.json", "b", {512: (20, 20), 8192: (19, 20)})
    tried, untried = compare([first, second])
    assert tried.verdict == "better"
    assert (untried.share_first, untried.share_second, untried.trials_second) == (None, 0.95, 20)
    assert (untried.verdict, untried.note) == ("not tried", "a not tried: none right at 512")
    assert untried.to_dict()["difference"] is None
    third = results(tmp_path / "c.json", "c", {8192: (0, 0)})
    (only,) = compare([first, third])
    assert only.note == "a not tried: none right at 512; c not tried"
    text = "".join(str(cell) for column in comparison_table([tried, untried]).columns for cell in column.cells)
    assert "a not tried: none right at 512" in text


def test_shares_of_answers_are_compared_as_means(tmp_path: Path) -> None:
    half, most, ones = [0.5, 0.25, 0.75] * 10, [0.75, 1.0, 1.0] * 10, [1.0, 0.0, 1.0] * 10
    first = needles(tmp_path / "a.json", "a", {"multivalue": {512: half}, "single": {512: ones, 1024: ones}})
    second = needles(tmp_path / "b.json", "b", {"single": {512: ones}, "multivalue": {512: most, 1024: most}})
    parts, whole = compare([first, second])
    assert [(row.task, row.length, row.verdict) for row in (parts, whole)] == [
        ("multivalue", 512, "better"),
        ("single", 512, "cannot tell"),
    ]
    assert (parts.low, parts.high) == difference_of_means(most, half)
    assert (whole.low, whole.high) == newcombe(20, 30, 20, 30)
    assert parts.needed == scores_needed(half, most)
    assert scores_needed(half, half) is None
    (one,) = compare([first, needles(tmp_path / "c.json", "c", {"single": {1024: ones}})])
    assert (one.task, one.length, one.difference) == ("single", 1024, 0)


def test_models_without_a_task_in_common_are_refused(tmp_path: Path) -> None:
    first = needles(tmp_path / "a.json", "a", {"single": {512: [1.0]}})
    with pytest.raises(UserError, match="a and d have no task in common"):
        compare([first, needles(tmp_path / "d.json", "d", {"variables": {512: [1.0]}})])


def drawn(p: float, q: float) -> tuple[list[list[float]], list[list[float]]]:
    """A thousand evaluations of two models: forty trials of four answers each."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ((torch.rand(1000, 40, 4, generator=generator) < x).double().mean(-1).tolist() for x in (p, q))
    return ours, theirs


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.7), (0.5, 0.5), (0.99, 0.0), (0.02, 0.1)])
def test_intervals_of_means_cover(p: float, q: float) -> None:
    intervals = [difference_of_means(a, b) for a, b in zip(*drawn(p, q), strict=True)]
    assert sum(low <= p - q <= high for low, high in intervals) >= 950


def test_intervals_of_means_are_narrower_than_those_of_counts_and_never_certain() -> None:
    pairs = list(zip(*drawn(0.9, 0.7), strict=True))
    means = [difference_of_means(a, b) for a, b in pairs]
    counts = [newcombe(sum(a), 40, sum(b), 40) for a, b in pairs]
    assert sum(high - low for low, high in means) < 0.75 * sum(high - low for low, high in counts)
    assert difference_of_means([1.0] * 3, [0.5] * 3)[0] < 0 < difference_of_means([1.0] * 30, [0.5] * 30)[0]


def test_one_file_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 file is given; a comparison needs at least two"):
        compare([results(tmp_path / "a.json", "a", {128: (5, 10)})])


def other_wording(file: Path) -> None:
    results(file, "b", {128: (5, 10)}, wording="train")


def former_wording(file: Path) -> None:
    results(file, "b", {128: (5, 10)}, wording="held-out")


def other_lengths(file: Path) -> None:
    results(file, "b", {256: (5, 10)})


def perplexity(file: Path) -> None:
    file.write_text(json.dumps({"version": 1, "kind": "perplexity", "models": []}))


def other_kind(file: Path) -> None:
    needles(file, "b", {"single": {128: [1.0]}})


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (other_wording, r"b\.json and .*a\.json differ in wording; only the same settings can be compared"),
        (former_wording, r"b\.json .* settings.wording is 'held-out', which is now 'validation'; rename it"),
        (other_lengths, "a and b have no length in common"),
        (perplexity, r"b\.json has results of perplexity; passkey or needle is needed"),
        (other_kind, r"b\.json has results of needle and .*a\.json of passkey; one kind is needed"),
    ],
)
def test_files_that_cannot_be_compared_get_one_sentence(
    tmp_path: Path, write: Callable[[Path], None], sentence: str
) -> None:
    first = results(tmp_path / "a.json", "a", {128: (5, 10)})
    write(tmp_path / "b.json")
    with pytest.raises(UserError, match=sentence):
        compare([first, tmp_path / "b.json"])
