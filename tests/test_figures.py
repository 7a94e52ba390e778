"""Tables of pages and the picture of README are what the committed results give; pictures have a dark version."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import matplotlib
import pytest

from tools import figures

DRAWN_WITH = re.search(r"Matplotlib v([\d.]+)", (figures.ROOT / figures.PICTURE).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [figures.README, figures.RESULTS], ids=str)
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
    for path in (figures.README, figures.RESULTS, Path("docs/images"), Path("docs/data")):
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
