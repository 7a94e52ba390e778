"""Files that are written completely or not at all, and the results of evaluations in such files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from bayesattn.errors import UserError

# Format of result files. Other versions are refused.
VERSION = 1
# Keys that results of each kind must have.
REQUIRED_KEYS = {
    "passkey": ("model", "train_length", "settings", "cells"),
    "needle": ("model", "train_length", "settings", "cells"),
    "perplexity": ("models",),
    "inspect": ("model", "heads", "posteriors", "cache"),
    "savings": ("parameters", "stages"),
}


def is_main_process() -> bool:
    """Whether this process prints and writes files; the other processes of a training run do neither."""
    return os.environ.get("RANK", "0") == "0"


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that neither a reader nor a crash leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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


def write_results(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write results as JSON, with their kind and the version of the format."""
    write_whole(path, json.dumps({"version": VERSION, "kind": kind, **content}, indent=1) + "\n")


def read_results(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a file of `write_results`; raises UserError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not a file of results: it is not JSON") from problem
    if not isinstance(content, dict) or "version" not in content or "kind" not in content:
        raise UserError(f"{path} is not a file of results")
    if content["version"] != VERSION:
        raise UserError(f"{path} has results of version {content['version']}; this is version {VERSION}, measure again")
    if kind is not None and content["kind"] != kind:
        raise UserError(f"{path} has results of {content['kind']}; {kind} is needed")
    if missing := [key for key in REQUIRED_KEYS.get(content["kind"], ()) if key not in content]:
        raise UserError(f"{path} is not a whole file of results: it has no {missing[0]}")
    if content["kind"] == "passkey" and content["settings"].get("wording") == "held-out":
        raise UserError(
            f"{path} has results of the wording 'held-out', which is now 'validation'; rename it in the file"
        )
    return content
