"""The code in README and docs runs, and what README shows as its output is its output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from bayesattn.attention.kernels import registry as kernels
from bayesattn.cli import app
from bayesattn.cli.errors import ClickException

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
    shown = " ".join(page.read_text().split())  # a page may break long lines
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
        assert " ".join(capsys.readouterr().out.split()) in shown


def test_pages_have_no_blanks_left_to_fill() -> None:
    assert not [page.name for page in PAGES if "@@" in page.read_text() or not page.read_text().strip()]


def anchors(page: Path) -> list[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" not in target:
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name} links to {target}"
                assert not heading or heading in anchors(linked), f"{page.name} links to {target}#{heading}"


def test_pictures_of_a_page_exist_for_light_and_dark_ones() -> None:
    for page in PAGES:
        for dark, light in re.findall(r'srcset="([^"]*)".*?src="([^"]*)"', page.read_text(), flags=re.DOTALL):
            assert (page.parent / light).exists(), f"{page.name} shows {light}"
            assert dark == light.replace(".svg", "-dark.svg"), f"{page.name} shows {dark} for {light}"
            assert (page.parent / dark).exists(), f"{page.name} shows {dark}"


def command_lines(page: Path) -> list[str]:
    """Lines of indented and fenced blocks that start with `bayesattn`; a continued line is one."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(
        r"^(?:    )?(?:\$ )?(bayesattn (?:[a-z]+ |--).*)$", "\n".join(code_lines(text)), flags=re.MULTILINE
    )


def code_lines(text: str) -> list[str]:
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line)
    return lines


def parse(line: str) -> None:
    """Parse a command line as the program does, without running it."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="bayesattn")
    while isinstance(command, typer.core.TyperGroup):
        name, child, words = command.resolve_command(context, words)
        assert name is not None
        assert child is not None
        command = child
        if not isinstance(command, typer.core.TyperGroup):
            command.make_context(name, words, parent=context)


@pytest.mark.parametrize(
    ("page", "line"), [(page.name, line) for page in PAGES for line in command_lines(page)], ids=lambda value: value
)
def test_command_lines_on_a_page_are_understood(page: str, line: str) -> None:
    parse(line)
    for recipe in re.findall(r"\S+\.yaml", line):
        assert (ROOT / recipe).exists(), f"{page} names {recipe}"


def test_the_readme_has_command_lines() -> None:
    assert len(command_lines(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("line", ["bayesattn eval passkey", "bayesattn evaluate x", "bayesattn inspect x --tokenz 3"])
def test_a_command_line_that_is_wrong_is_not_understood(line: str) -> None:
    with pytest.raises(ClickException):
        parse(line)


def test_targets_of_make_on_a_page_are_in_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{page.name} names make {target}"


def test_extras_on_a_page_are_in_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], flags=re.MULTILINE)
    for page in PAGES:
        for names in re.findall(r"pip install .*\[([\w,]+)\]", page.read_text()):
            assert set(names.split(",")) <= {*extras}, f"{page.name} names [{names}]"
