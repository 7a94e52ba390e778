"""Files that are whole or not there, and the results that evaluations keep in them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bayesattn.errors import UserError

# Of result files; another one is refused rather than misread.
VERSION = 1
# What results of a kind cannot be read without.
NEEDED = {
    "passkey": ("model", "train_length", "settings", "cells"),
    "needle": ("model", "train_length", "settings", "cells"),
    "perplexity": ("models",),
    "inspect": ("model", "heads", "posteriors", "cache"),
    "savings": ("parameters", "stages"),
}


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader or a kill never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def whole_lines(path: Path) -> list[str]:
    """Of a file that grows line by line; one that was being written when all ended is left out. No file, no lines."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return lines[:-1]


def short_name(model: str) -> str:
    """The name of a model; training leaves it in a folder that is just called model."""
    path = Path(model)
    stem, plus, scaling = path.name.partition("+")
    return path.resolve().parent.name + plus + scaling if stem == "model" else path.name


def content_of(source: str) -> dict[str, str]:
    """What a file or folder given as a source has in it, as a hash to tell it from another of the same name.

    Of a folder, names and contents of the files that documents are read from: results may be written beside them. No
    file, nothing.
    """
    path = Path(source)
    if path.is_file():
        return {"content": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    if not path.is_dir():
        return {}
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl", ".parquet") and p.is_file()):
        content = file.read_bytes()
        # With its size, so that no name can be taken for the end of the file before.
        digest.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return {"content": digest.hexdigest()[:16]}


def joined_commands(*commands: str) -> str:
    """Every command that had a part in a file, each once: together they make it again."""
    return " && ".join(dict.fromkeys(part for command in commands for part in command.split(" && ") if part))


def write_results(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Results as JSON, with their kind and the version of the format."""
    write_whole(path, json.dumps({"version": VERSION, "kind": kind, **content}, indent=1) + "\n")


def read_results(path: Path, kind: str | None = None) -> dict[str, Any]:
    """What `write_results` wrote; anything else is refused in one sentence."""
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
    if lacking := [key for key in NEEDED.get(content["kind"], ()) if key not in content]:
        raise UserError(f"{path} is not a whole file of results: it has no {lacking[0]}")
    return content
