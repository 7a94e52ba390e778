"""Result files: written whole, checked on reading, and found by what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayesattn.errors import UserError, shown
from bayesattn.files import quoted, read_json, to_json, write_whole
from bayesattn.schemas import check_of
from bayesattn.studies.study import Result, Study, all_studies, find_study

# Format of result files. Other versions are refused.
VERSION = 1
# Beside pictures, in a file with this suffix: where the results are, if not there.
ELSEWHERE = ".elsewhere"


def write_results(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write results as JSON, with their kind and the version of the format."""
    write_whole(path, to_json({"version": VERSION, "kind": kind, **content}))


def read_results(path: Path, *kinds: str) -> dict[str, Any]:
    """Read a file of `write_results`, of one of these kinds if any are given; raises UserError for any other file."""
    name = quoted(path)
    content = _with_kind(read_json(path, "a file of results: it is not JSON"))
    if not isinstance(content, dict) or "version" not in content or "kind" not in content:
        raise UserError(f"{name} is not a file of results")
    if content["version"] != VERSION:
        raise UserError(
            f"{name} has results of version {shown(content['version'])}; this is version {VERSION}, measure again"
        )
    if not isinstance(content["kind"], str) or not content["kind"].isprintable() or len(content["kind"]) > 60:
        raise UserError(f"{name} is not a file of results: its kind is {shown(content['kind'])}")
    if kinds and content["kind"] not in kinds:
        raise UserError(f"{name} has results of {content['kind']}; {' or '.join(kinds)} is needed")
    study = find_study(content["kind"])
    if study is not None and (wrong := check_of(study.result)(content)):
        raise UserError(f"{name} is not a whole file of results: {wrong[0].removeprefix('.') or 'it'} {wrong[1]}")
    return content


def _with_kind(content: Any) -> Any:
    """Files of earlier benchmarks have neither kind nor version: their kind is that of the only study they fit."""
    if not isinstance(content, dict) or "kind" in content or "version" in content:
        return content
    fitting = [study.kind for study in all_studies() if check_of(study.result)(content) is None]
    return {"version": VERSION, "kind": fitting[0], **content} if len(fitting) == 1 else content


def load_result(path: Path) -> tuple[Study[Any, Any], Result]:
    """The study of a result file, and its result."""
    content = read_results(path)
    study = find_study(content["kind"])
    if study is None:
        raise UserError(f"{quoted(path)} has results of {content['kind']}; no study writes these")
    return study, study.result.from_dict(content)


def earlier_results(path: Path, kind: str) -> dict[str, Any] | None:
    """The results that a file has already; None if there is no file, or an empty one."""
    return read_results(path, kind) if path.exists() and path.stat().st_size else None


def find_results(paths: Sequence[Path]) -> list[Path]:
    """The given files, and all result files in the given folders, also those that were written elsewhere.

    Raises:
        UserError: a file or folder is not there, or a folder has no results.
    """
    results: list[Path] = []
    for path in paths:
        if path.is_dir():
            results += _in_folder(path)
        elif path.exists():
            results.append(path)
        else:
            raise UserError(f"there is no file or folder {path}")
    return list(dict.fromkeys(results))


def _in_folder(folder: Path) -> list[Path]:
    inside = sorted(file for file in folder.rglob("*.json") if _is_result(file))
    pointers = sorted(folder.rglob(f"*{ELSEWHERE}"))
    elsewhere = [Path(pointer.read_text(encoding="utf-8").strip()) for pointer in pointers]
    inside += [file for file in elsewhere if _is_result(file)]
    if not inside and elsewhere:
        raise UserError(f"{folder} has no results; they were written to {elsewhere[-1]}, which has none either")
    if not inside:
        raise UserError(f"{folder} has no results; a file or folder that a study has written is needed")
    return inside


def _is_result(file: Path) -> bool:
    """Whether a file holds results of a study, whatever its name."""
    try:
        content = _with_kind(read_json(file))
    except UserError:
        return False
    return isinstance(content, dict) and "version" in content and find_study(str(content.get("kind"))) is not None
