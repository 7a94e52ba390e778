"""One HTML page with all results. It needs no network, and works on a phone, by keyboard and without colours."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

import bayesattn
from bayesattn.drawing import html, palette
from bayesattn.studies.results import find_results, load_result
from bayesattn.studies.study import Result, Study, all_studies


def make_page(paths: Sequence[Path], title: str = "How far it reads") -> str:
    """The page as HTML, from result files and folders with result files."""
    from jinja2 import Environment

    loaded = [(path, *load_result(path)) for path in find_results(paths)]
    sections = [
        section
        for study in all_studies()
        if (results := [result for _, of, result in loaded if of.kind == study.kind])
        for section in _sections(study, results)
    ]
    template = files("bayesattn").joinpath("assets/report.html.j2").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            title=title,
            version=bayesattn.__version__,
            palette=Markup(palette.css()),
            sections=sections,
            runs=[_run(path, result) for path, _, result in loaded],
        )
    )


def _sections(study: Study[Any, Any], results: Sequence[Result]) -> list[html.Section]:
    """What a study has for the page; by default its tables, and a chart if it has one."""
    if hasattr(study.show, "sections"):
        sections: list[html.Section] = study.show.sections(results)
        return sections
    parts = []
    for result in results:
        parts.append(html.from_terminal(study.show.tables(result)))
        if hasattr(study.show, "chart"):
            parts.append(study.show.chart(result))
    return [html.Section(study.kind, study.kind.replace("-", " ").capitalize(), html.joined(parts))]


def _run(path: Path, result: Result) -> dict[str, str]:
    settings = ", ".join(
        _setting(key, value) for key, value in getattr(result, "settings", {}).items() if _is_set(value)
    )
    partial = "Partial: the same command resumes. " if result.partial else ""
    return {"file": str(path), "command": result.command or "(called from Python)", "settings": partial + settings}


def _is_set(value: object) -> bool:
    return value is not None and value is not False


def _setting(key: str, value: object) -> str:
    """`digits 5`, `needles 3 to 5`, `teacher forced`."""
    name = key.replace("_", " ")
    if value is True:
        return name
    return f"{name} {' to '.join(map(str, value)) if isinstance(value, list) else value}"
