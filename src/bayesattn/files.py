"""Files that are whole or not there, and the results that evaluations keep in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bayesattn.errors import UserError

# Of result files; another one is refused rather than misread.
VERSION = 1


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader or a kill never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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
    return content
