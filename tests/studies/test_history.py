"""What heads learned, from the log of a run."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bayesattn.errors import UserError
from bayesattn.priors import generalized_gaussian
from bayesattn.report.page import make_page
from bayesattn.studies.history import run as run_module
from bayesattn.studies.history.run import HeadHistory, Settings, cluster, read_history, run
from bayesattn.studies.history.show import figures, tables
from bayesattn.studies.results import write_results
from bayesattn.studies.study import Progress


def layer(*betas: float, **more: list[float | None]) -> dict[str, Any]:
    return {"beta": list(betas), "alpha": [1.0] * len(betas), **more}


LOG = [
    {"step": 0, "seconds": 0.0, "heads": [layer(0.0, 0.0), layer(0.0, 0.0, temperature=[1.0, 1.0])]},
    {"step": 25, "seconds": 1.0, "loss": 5.0, "heads": [layer(0.2, -0.1), layer(-0.2, 0.1, temperature=[2.0, 1.0])]},
    {"step": 30, "seconds": 1.2, "passkey, 1×": 0.5},
    {"step": 50, "seconds": 2.0, "loss": 4.0, "heads": [layer(0.3, 0.1), layer(-0.7, 0.2, temperature=[3.0, None])]},
    {"step": 50, "train_loss": 4.5, "heads": [layer(0.3, 0.1), layer(-0.7, 0.2, temperature=[3.0, 1.0])]},
]  # fmt: skip


def write_log(folder: Path, entries: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


@pytest.mark.parametrize("given", ["zeros-0", "zeros-0/model", "zeros-0/model/log.jsonl"])
def test_a_log_is_read_from_a_run_its_model_or_the_file(given: str, tmp_path: Path) -> None:
    write_log(tmp_path / "zeros-0" / "model", LOG)
    history = read_history(str(tmp_path / given))
    assert (history.run, history.steps) == ("zeros-0", [0, 25, 50])
    assert [(head.layer, head.head) for head in history.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert history.heads[2].parameters == {
        "beta": [0.0, -0.2, -0.7],
        "alpha": [1.0, 1.0, 1.0],
        "temperature": [1.0, 2.0, 3.0],
    }


def test_clusters_are_those_of_the_paper_and_a_head_is_in_its_last_one_since_it_last_changed() -> None:
    assert [cluster(beta) for beta in (0.4, 0.0, -0.3, -0.6, -1.0, None)] == [
        "local", "flat", "retrieval", "aggressive retrieval", "aggressive retrieval", "not finite",
    ]  # fmt: skip
    assert run_module.AGGRESSIVE_BETA == generalized_gaussian.AGGRESSIVE_BETA
    head = HeadHistory(0, 0, {"beta": [0.0, 0.2, -0.1, -0.2, -0.3]})
    assert head.since([0, 25, 50, 75, 100]) == 50
    assert HeadHistory(0, 0, {"beta": [1.0, 0.5]}).since([0, 25]) == 0
    assert HeadHistory(0, 0, {"nearest": [1.0]}).since([0]) is None


def test_a_history_is_shown_drawn_and_on_the_page(tmp_path: Path) -> None:
    write_log(tmp_path / "run", LOG)
    settings = Settings(run=str(tmp_path / "run"), out=tmp_path / "out")
    result = run(settings, Progress())
    console = Console(width=80, record=True, file=StringIO())
    console.print(*tables(result))
    text = console.export_text()
    assert "aggressive" in text
    assert "0.00 → -0.70" in text
    assert max(map(len, text.splitlines())) <= 80
    assert [file.suffix for file in figures(result, settings.folder)] == [".png", ".svg"]
    write_results(settings.results, "history", result.to_dict())
    page = make_page([settings.results])
    assert "layer 2" in page
    assert page.count("<svg") >= 2


def test_the_folder_of_a_history_has_the_name_of_the_run(tmp_path: Path) -> None:
    for given in ("runs/zeros-0", "runs/zeros-0/model", "runs/zeros-0/log.jsonl", "runs/zeros-0/model/log.jsonl"):
        assert Settings(run=given).folder == Path("runs/history-zeros-0")


def changed(place: int, heads: object) -> list[dict[str, Any]]:
    return [{**entry, "heads": heads} if number == place else entry for number, entry in enumerate(LOG)]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"step": 25, "loss": 2.0}], "has nothing about heads"),
        ([], "has nothing about heads"),
        (changed(0, 3), "is not the log of a run, or it is damaged"),
        (changed(1, [layer(1.0, 2.0)]), "is not the log of a run, or it is damaged"),
        (changed(1, [layer(1.0), layer(1.0)]), "is not the log of a run, or it is damaged"),
        (
            changed(0, [{"beta": ["a", 0], "alpha": [0, 0]}, LOG[0]["heads"][1]]),
            "heads[0].parameters.'beta'[0] is 'a'; a number",
        ),  # type: ignore[index]
    ],
)
def test_a_log_without_heads_or_with_damage_gets_one_sentence(
    entries: list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    write_log(tmp_path, entries)
    with pytest.raises(UserError) as caught:
        read_history(str(tmp_path))
    assert says in str(caught.value)
