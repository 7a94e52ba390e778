"""Runs of pass keys go on where they stopped, and never mix results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.passkey import Task
from bayesattn.evaluation.reader import Reader
from bayesattn.studies.compare.run import compare
from bayesattn.studies.passkey import run as study
from bayesattn.studies.passkey.run import Settings
from bayesattn.studies.results import write_results
from bayesattn.studies.study import Progress
from tests.evaluation.test_passkey import oracle
from tests.studies.saved import run_trials


def run(file: Path, reader: Reader | None = None, trials: int = 24, **settings: Any) -> list[Cell]:
    *_, cells = run_trials(reader or oracle(wrong_every=3), Task(), [256, 2048], trials, file, **settings)
    return cells


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.json", oracle())
    file = tmp_path / "killed.json"
    killed = run_trials(oracle(), Task(), [256, 2048], 24, file)
    for _ in range(2):
        next(killed)
    killed.close()
    before = json.loads(file.read_text())["cells"]
    assert [cell["trials"] for cell in before] == [24, 8]
    reader = oracle()
    again = run(file, reader)
    assert reader.model.prompts == 16
    assert [cell.to_dict() | {"seconds": 0} for cell in again] == [cell.to_dict() | {"seconds": 0} for cell in whole]
    more = run(file, reader, trials=30)
    assert [cell.trials for cell in more] == [30, 30]


def test_more_asked_for_later_keeps_what_a_file_tells(tmp_path: Path) -> None:
    file = tmp_path / "passkey.json"
    blind = oracle(reads=600)
    run(file, blind, command="first")
    content = json.loads(file.read_text())
    write_results(file, "passkey", {**content, "dense": {"ratio": 59}})
    short, long = run(file, blind, trials=60, command="second")
    assert (short.trials, long.trials, long.note) == (60, 24, "stopped: none of 24 right")
    content = json.loads(file.read_text())
    assert (content["dense"], content["command"]) == ({"ratio": 59}, "first && second")
    run(file, blind, trials=60, command="second")
    assert json.loads(file.read_text())["command"] == "first && second"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 0}, "has results of version 0; this is version 1, measure again"),
        ({"kind": "perplexity", "models": []}, "has results of perplexity; passkey is needed"),
        ({"fingerprint": "other"}, "holds another evaluation, with other fingerprint; choose another file"),
        ({"settings": {"wording": "held-out"}}, "settings.wording is 'held-out', which is now 'validation'"),
    ],
)
def test_other_results_are_not_continued(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    file = tmp_path / "passkey.json"
    run(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=sentence):
        run(file)


def test_another_seed_is_not_continued(tmp_path: Path) -> None:
    run(tmp_path / "passkey.json")
    with pytest.raises(UserError, match="holds another evaluation, with other seed; choose another file"):
        run(tmp_path / "passkey.json", seed=1)


def test_a_damaged_file_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "passkey.json").write_text("half of it {")
    with pytest.raises(UserError, match="is not a file of results: it is not JSON"):
        run(tmp_path / "passkey.json")


def test_another_haystack_of_the_same_name_is_not_continued(tmp_path: Path) -> None:
    hay = tmp_path / "hay.txt"
    hay.write_text("It rained all day. " * 50)
    list(run_trials(oracle(), Task(haystack=str(hay)), [256], 2, tmp_path / "own.json"))
    hay.write_text("It rained all night. " * 50)
    with pytest.raises(UserError, match="holds another evaluation, with other content; choose another file"):
        list(run_trials(oracle(), Task(haystack=str(hay)), [256], 4, tmp_path / "own.json"))


def test_a_result_of_the_paper_s_protocol_says_so_and_is_not_mixed_with_ours(tmp_path: Path) -> None:
    settings = Settings(model="bam-tiny", lengths="2x", protocol="paper", json=tmp_path / "paper.json")
    result = study.run(settings, Progress())
    assert result.settings["protocol"] == "paper"
    assert result.title == "the paper's protocol, 5 digits, teacher-forced, 20 depths"
    assert [cell.trials for cell in result.cells] == [20]
    assert settings.folder.name == "passkey-bam-tiny-protocol-paper"
    ours = {**result.settings, "needles": [3, 5]}
    del ours["protocol"]
    for name, content in (("paper", result.settings), ("ours", ours)):
        write_results(tmp_path / f"{name}.json", "passkey", {**result.to_dict(), "settings": content})
    for order in (("paper", "ours"), ("ours", "paper")):
        with pytest.raises(UserError, match="differ in needles, protocol; only the same settings can be compared"):
            compare([tmp_path / f"{name}.json" for name in order])


@pytest.mark.parametrize(
    ("given", "trials"),
    [({}, 100), ({"trials": 7}, 7), ({"protocol": "paper"}, 20), ({"protocol": "paper", "trials": 40}, 40)],
)
def test_the_paper_s_protocol_has_twenty_trials(given: dict[str, Any], trials: int) -> None:
    assert Settings(model="bam-tiny", **given).trials_at_each == trials
