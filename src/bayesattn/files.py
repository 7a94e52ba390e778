"""Files that are written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bayesattn.errors import UserError, cut, first_line

PARTIAL = ".partial"
LONGEST_NAME = 160


def is_main_process() -> bool:
    """Whether this process prints and writes files; the other processes of a training run do neither."""
    return os.environ.get("RANK", "0") == "0"


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file in one step, so that neither a reader nor a crash leaves half of it.

    Raises:
        UserError: the file cannot be written; the file before stays as it is.
    """
    with _naming(path):
        _check_kind(path)
        partial = path.with_name(path.name + PARTIAL)
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content if isinstance(content, bytes) else content.encode())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def check_writable(*paths: Path, results: Path | None = None) -> None:
    """Make sure, before long work, that these files can be written; leaves nothing behind.

    Raises:
        UserError: one of them cannot be written, or `results` would replace a file that is not JSON.
    """
    for path in paths if results is None else (results, *paths):
        with _naming(path):
            _check_kind(path)
            folder = path.absolute().parent
            while not folder.exists():
                folder = folder.parent
            with suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(folder / (path.name + PARTIAL))  # raises an error if no file can have this name
            TemporaryFile(dir=folder).close()
    if results is not None and results.is_file() and results.stat().st_size:
        read_json(results, "JSON, so it is not replaced; another file is needed")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of the operating system becomes a sentence with the name of the file."""
    try:
        yield
    except UnicodeEncodeError as problem:
        raise UserError(f"{quoted(path)} cannot be written: {problem.reason}") from problem
    except (OSError, ValueError) as problem:
        if isinstance(problem, UserError):
            raise
        reason = getattr(problem, "strerror", None) or first_line(problem)
        raise UserError(f"{quoted(path)} cannot be written: {reason}") from problem


def quoted(path: Path) -> str:
    """A path as error messages quote it."""
    return cut(path, LONGEST_NAME)


def _check_kind(path: Path) -> None:
    """A folder or a device would be replaced."""
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder; the name of a file is needed")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} cannot be written: it is not a regular file")


def to_json(content: object, indent: int = 1) -> str:
    """JSON; numbers that are not finite become null, and bytes of a name that are no text become question marks."""
    return json.dumps(_plain(content), indent=indent, allow_nan=False) + "\n"


def _plain(content: object) -> object:
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    if isinstance(content, str):
        return content.encode(errors="replace").decode()
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(path: Path, needed: str = "JSON") -> Any:
    """The content of a JSON file; raises UserError, which says what is needed, if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half of a character can be neither printed nor written
    except OSError as problem:
        raise UserError(f"{quoted(path)} cannot be read: {problem.strerror or first_line(problem)}") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, not JSON, too long a number or too many brackets
        raise UserError(f"{quoted(path)} is not {needed}") from problem
    return content


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that grows line by line, without an incomplete last line; empty if there is no file."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return lines[:-1]


def short_name(model: str) -> str:
    """The name of a model for people: that of its folder, or of the folder's parent if the folder is called model."""
    path = Path(model)
    stem, plus, scaling = path.name.partition("+")
    return path.resolve().parent.name + plus + scaling if stem == "model" else path.name


def content_of(source: str) -> dict[str, str]:
    """A hash of the content of a source, which distinguishes it from another source of the same name.

    For a folder it covers the names and contents of the files that documents are read from, because results may be
    written to the same folder. Empty if the source is neither a file nor a folder.
    """
    path = Path(source)
    if path.is_file():
        return {"content": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    if not path.is_dir():
        return {}
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl", ".parquet") and p.is_file()):
        content = file.read_bytes()
        # The size separates the content of one file from the name of the next.
        digest.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return {"content": digest.hexdigest()[:16]}


def joined_commands(*commands: str) -> str:
    """All commands that contributed to a file, each once, as one command that reproduces it."""
    return " && ".join(dict.fromkeys(part for command in commands for part in command.split(" && ") if part))
