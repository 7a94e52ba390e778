"""Tables of pages and the picture of README are what the committed results give; pictures have a dark version."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from bayesattn.studies.results import load_result
from tests.bad_inputs.cases import write
from tools import bench_tables, figures, fit_tables

DRAWN_WITH = re.search(r"Matplotlib v([\d.]+)", (figures.ROOT / figures.PICTURE).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [figures.README, figures.RESULTS, figures.FIT, figures.LONGER], ids=str)
def test_the_table_of_a_page_is_what_the_results_give(page: Path) -> None:
    assert str(page) not in figures.stale(), "`make figures` remakes it"


@pytest.mark.skipif(
    DRAWN_WITH is None or DRAWN_WITH[1] != matplotlib.__version__, reason="drawn with another matplotlib"
)
def test_the_picture_of_the_readme_is_what_the_results_give() -> None:
    assert str(figures.PICTURE) not in figures.stale(), "`make figures` remakes it"


@pytest.mark.parametrize(("path", "made"), figures.dark_pictures().items(), ids=str)
def test_a_picture_for_dark_pages_is_its_light_one_in_other_colours(path: Path, made: str) -> None:
    assert (figures.ROOT / path).read_text(encoding="utf-8") == made, "`make figures` remakes it"
    assert "#ffffff" not in made
    assert "#000000" not in made


def test_other_results_make_the_table_and_the_picture_stale(tmp_path: Path) -> None:
    pages = (figures.README, figures.RESULTS, figures.FIT, figures.LONGER)
    for path in (*pages, Path("docs/images"), Path("docs/data")):
        source = figures.ROOT / path
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / path)
    file = tmp_path / "docs" / "data" / "passkey-bam-tiny.json"
    result = json.loads(file.read_text())
    cell = result["cells"][0]
    cell["outcomes"][0][1] = 0.0
    cell |= {"correct": 99, "accuracy": 0.99}
    file.write_text(json.dumps(result))
    assert figures.stale(tmp_path) == [
        str(figures.README),
        str(figures.RESULTS),
        str(figures.PICTURE),
        "docs/images/passkey-dark.svg",
    ]
    assert "| `bam-tiny` | 99 |" in figures.figures(tmp_path)[figures.README]


def _loaded(kind: str, tmp_path: Path) -> Any:
    return load_result(write(tmp_path / "result.json", kind))[1]


def test_tables_of_attention_say_why_something_was_not_measured(tmp_path: Path) -> None:
    result = _loaded("bench-attention", tmp_path)
    timed, training = result.rows
    rows = [
        replace(timed, ratio=1.25),
        replace(timed, method="SDPA with bias matrix", seconds=None, peak_bytes=None, note="needs 13 GB"),
        replace(training, method="FlexAttention, compiled", seconds=None, peak_bytes=None, note="no backward on CPU"),
    ]
    tables = bench_tables.attention(replace(result, rows=rows))
    assert "| tokens | bayesattn | SDPA with bias matrix |" in tables["attention forward"]
    assert "| 512 | **1.25×** 500 ms | needs 13 GB |" in tables["attention forward"]
    assert "| 512 | 1 MB | needs 13 GB |" in tables["attention forward memory"]
    assert "| 512 | no backward on CPU |" in tables["attention training"]


def test_tables_of_long_contexts_have_the_memory_of_plain_attention(tmp_path: Path) -> None:
    result = _loaded("bench-long", tmp_path)
    later = replace(result.rows[0], tokens=1024, dense_seconds=None, dense_peak_bytes=None)
    tables = bench_tables.long(replace(result, rows=[*result.rows, later]))
    assert "| 512 | 500 ms | **5.0×** 100 ms, 50.0% |" in tables["long prefill"]
    assert "| 1,024 | would take about 2 s | 100 ms, 50.0% |" in tables["long prefill"]
    assert "| 512 | 1 MB | 1 MB |" in tables["long memory"]
    assert (
        "| 512 | all local | 100 tokens/s | **2.0×** 200 tokens/s | 0.1 of 1.0 MB, 10.0% |" in tables["long decoding"]
    )


@pytest.mark.parametrize("kind", ["bench-attention", "bench-long", "bench-conditioned", "bench-step", "variants"])
def test_a_result_file_of_docs_fills_its_tables(kind: str, tmp_path: Path) -> None:
    page = (figures.ROOT / figures.RESULTS).read_text(encoding="utf-8")
    tables = figures.TABLES[Path(f"docs/data/{kind}.json")](_loaded(kind, tmp_path))
    assert all(tables.values())
    assert kind == "variants" or all(f"<!-- {mark} -->\n" in page for mark in tables)


def test_tables_of_single_tokens_have_ratios(tmp_path: Path) -> None:
    tables = bench_tables.step(_loaded("bench-step", tmp_path))
    assert "| 256 | all local | 10 µs | **10.00×** 100 µs | 10.0% |" in tables["step tokens"]
    assert "×** " in tables["step generate"]


def test_the_tables_of_fit_have_marks_on_their_page(tmp_path: Path) -> None:
    scored = {"length": 1024, "bytes": 10**6, "end_bytes": 2 * 10**6, "losses": [3.0, 3.1], "found": [True, False]}
    kvpress = {"rows": [
        scored | {"method": "full cache", "keep": None, "divergences": [0.0, 0.0]},
        scored | {"method": "SnapKV", "keep": 0.25, "divergences": [0.1, 0.3], "losses": [3.1, 3.2]},
    ]}  # fmt: skip
    results = {Path(kind): _loaded(kind, tmp_path) for kind in ("fit", "cache", "bench-step")}
    tables = fit_tables.tables({**results, Path("kvpress"): kvpress})
    page = (figures.ROOT / figures.FIT).read_text(encoding="utf-8")
    assert {"fits", "decoding", "kvpress"} < tables.keys()
    assert all(f"<!-- {mark} -->\n" in page for mark in tables)
    assert "|  | 25% | SnapKV | 1.0 | 2.0 | 0.200 | +10.5 (+10.5 … +10.5) | 1 of 2 |" in tables["kvpress"]
    assert "| 1,024 | 10.0% | 20.0 | 10.0 | 20.0 | **1.00×** |" in tables["decoding"]
