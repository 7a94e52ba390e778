"""The code in README and docs runs, and what README shows as its output is its output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bayesattn.attention.kernels import registry as kernels

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for tag, text in fenced if tag == language]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_code_on_a_page_runs_from_top_to_bottom(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_KERNELS", dict(kernels._KERNELS))
    torch.use_deterministic_algorithms(False)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    printed = capsys.readouterr().out.strip()
    if page.name == "README.md":
        assert printed in [output.strip() for output in blocks(page, "")]


def test_pages_have_no_blanks_left_to_fill() -> None:
    assert not [page.name for page in PAGES if "@@" in page.read_text() or not page.read_text().strip()]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
