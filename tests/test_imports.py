"""Imports follow the line of arrows in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bayesattn"
NOT_CODE = {"assets"}  # checkpoints; the modules among them are copied into the folders of saved models


def written_order() -> list[list[str]]:
    """The groups of the line in CONTRIBUTING.md, from left to right."""
    line = re.search(r"\*\*Arrows go one way:\*\*\s+`([^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert line is not None, "CONTRIBUTING.md has no line of arrows"
    return [[name.strip() for name in group.split(",")] for group in line[1].split("→")]


def parts_of(source: Path) -> set[str]:
    """Folders and modules directly in the package."""
    folders = {file.parent.name for file in source.glob("*/__init__.py")}
    return folders | {file.stem for file in source.glob("*.py") if file.stem != "__init__"}


def modules_in(file: Path, source: Path) -> Iterator[str]:
    """Full names of the modules that a file imports: also in functions, under TYPE_CHECKING, or by name in a string."""
    package = [source.name, *file.relative_to(source).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(name for name in (base, node.module) if name)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{source.name}(\.\w+)+", str(node.value)):
            yield str(node.value)


def imported_parts(file: Path, source: Path) -> set[str]:
    """Parts of the package that a file imports; the package itself stands for all parts that it takes names from."""
    parts = parts_of(source)
    imported = set()
    for module in modules_in(file, source):
        top, _, rest = module.partition(".")
        if top != source.name:
            continue
        part = rest.partition(".")[0]
        if part in parts:
            imported.add(part)
        elif file != source / "__init__.py":
            imported |= imported_parts(source / "__init__.py", source)
    return imported


def violations(order: list[list[str]], source: Path) -> list[str]:
    """Imports that do not go from left to right."""
    place = {name: number for number, group in enumerate(order) for name in group}
    sentences = []
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source)
        importer = path.parts[0] if len(path.parts) > 1 else path.stem
        if importer in NOT_CODE or path.name == str(path) == "__init__.py":
            continue
        sentences += [
            f"{path} imports {part}, which is not to the right of {importer}"
            for part in sorted(imported_parts(file, source))
            if part != importer and place[part] <= place[importer]
        ]
    return sentences


def test_every_folder_and_module_is_in_the_line_once() -> None:
    names = [name for group in written_order() for name in group]
    assert sorted(names) == sorted(parts_of(SOURCE))


def test_imports_go_from_left_to_right() -> None:
    assert violations(written_order(), SOURCE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from package.left import thing",
        "import package.left.deep",
        "from package import left",
        "from .. import left",
        "from ..left import thing",
        "from package import name",  # which the package takes from left
        "if TYPE_CHECKING:\n    from package.left import thing",
        "def f():\n    from package.left import thing",
        "module = import_module('package.left.deep')",
        "from package.beside import thing",
    ],
)
def test_an_import_from_the_left_or_the_same_group_is_seen(line: str, tmp_path: Path) -> None:
    source = tmp_path / "package"
    for folder in ("left", "right", "beside"):
        (source / folder).mkdir(parents=True)
        (source / folder / "__init__.py").touch()
    (source / "__init__.py").write_text("from package.left import name")
    (source / "left" / "deep.py").write_text("from package.right import thing\nimport math")
    order = [["left"], ["right", "beside"]]
    assert violations(order, source) == []
    (source / "right" / "module.py").write_text(line)
    (sentence,) = violations(order, source)
    part = "beside" if "beside" in line else "left"
    assert sentence == f"right/module.py imports {part}, which is not to the right of right"
