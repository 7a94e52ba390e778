"""Remake README's picture and tables of pages from the result files in docs/data, and pictures for dark pages.

python -m tools.figures          write them
python -m tools.figures --check  only say which are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bayesattn.drawing import palette
from bayesattn.drawing.tables import multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import read_json, short_name, write_whole
from bayesattn.studies.extend import show as extend
from bayesattn.studies.passkey.run import Passkey
from bayesattn.studies.passkey.show import FOUND
from bayesattn.studies.results import load_result
from bayesattn.studies.retrieval_show import accuracy_figure
from bayesattn.studies.variants import show as variants
from tools import bench_tables, fit_tables

ROOT = Path(__file__).parents[1]
README, RESULTS, PICTURE = Path("README.md"), Path("docs/results.md"), Path("docs/images/passkey.svg")
FIT, FIT_RESULTS = Path("docs/fit.md"), "docs/data/fit-*.json"
MODELS = ("bam-tiny", "alibi-tiny", "rope-tiny", "nope-tiny", "sinusoidal-tiny")
TIMES = (1, 4, 16, 64, 500)
# Result files whose tables stand between marks of docs/results.md, where they are there.
TABLES: dict[Path, Callable[[Any], dict[str, str]]] = {
    Path("docs/data/bench-conditioned.json"): bench_tables.conditioned,
    Path("docs/data/bench-attention.json"): bench_tables.attention,
    Path("docs/data/bench-long.json"): bench_tables.long,
    Path("docs/data/bench-step.json"): bench_tables.step,
    Path("docs/data/bench-step-brief.json"): lambda result: {"step brief": bench_tables.step_tokens(result)},
    Path("docs/data/variants.json"): lambda result: {"variants": variants.markdown(result)},
}
LONGER = Path("docs/longer.md")
# The same for docs/longer.md.
TABLES_OF_LONGER: dict[Path, Callable[[Any], dict[str, str]]] = {
    Path(f"docs/data/extend-{name}.json"): extend.markdown for name in ("rope-tiny", "smollm2")
}
ALL_TIMES = (1, 1.5, 2, 3, 4, 8, 16, 64, 500)
TRIALS = 100
# On dark pages white is left out, so that the ground is that of the page, and lines and words are light.
DARK_COLOURS = dict(zip(palette.LIGHT, palette.DARK, strict=True)) | {
    "#ffffff": "none",
    "#000000": "#e6edf3",
    "#666666": "#9198a1",
    "#999999": "#7d8590",
    "#b0b0b0": "#7d8590",
}


def figures(root: Path = ROOT) -> dict[Path, str]:
    """Every file that is made, by its path under the root, with what it should hold."""
    results = [_result(root / "docs" / "data" / f"passkey-{name}.json") for name in MODELS]
    cells = {short_name(result.model): result.cells for result in results}
    train_length = results[0].train_length
    readme, on_results = ((root / page).read_text(encoding="utf-8") for page in (README, RESULTS))
    on_results = _with_table(on_results, "passkey", passkey_table(cells, train_length, ALL_TIMES, intervals=True))
    on_longer, on_fit = ((root / page).read_text(encoding="utf-8") for page in (LONGER, FIT))
    for mark, table in fit_tables.tables({path: _any_result(path) for path in sorted(root.glob(FIT_RESULTS))}).items():
        on_fit = _with_table(on_fit, mark, table)
    pages = {
        README: _with_table(readme, "passkey", passkey_table(cells, train_length, TIMES)),
        RESULTS: _with_tables(root, on_results, TABLES),
        FIT: on_fit,
        LONGER: _with_tables(root, on_longer, TABLES_OF_LONGER),
    }
    with TemporaryDirectory() as folder:
        _, picture = accuracy_figure(cells, train_length, Path(folder) / PICTURE.stem, FOUND)
        drawn = {PICTURE: picture.read_text(encoding="utf-8")}
    return {**pages, **drawn, **dark_pictures(root, drawn)}


def dark_pictures(root: Path = ROOT, drawn: Mapping[Path, str] | None = None) -> dict[Path, str]:
    """The picture for dark pages next to each SVG of docs/images, made of what is drawn anew or else of that file."""
    pictures = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in sorted((root / PICTURE).parent.glob("*.svg"))
        if not path.stem.endswith("-dark")
    }
    return {
        path.with_stem(f"{path.stem}-dark"): for_dark_pages(svg)
        for path, svg in {**pictures, **(drawn or {})}.items()
        if "<image" not in svg  # heat maps need their light ground
    }


def for_dark_pages(svg: str) -> str:
    """A picture of matplotlib in the colours of a dark page."""
    recoloured = re.sub(r"#[0-9a-f]{6}\b", lambda match: DARK_COLOURS.get(match[0], match[0]), svg)
    # What has no colour of its own, such as words, takes that of the figure.
    return recoloured.replace('<g id="figure_1">', f'<g id="figure_1" fill="{DARK_COLOURS["#000000"]}">', 1)


def _any_result(path: Path) -> Any:
    """A result of a study, or the content of a file that another tool wrote."""
    content = read_json(path, "a result file")
    return load_result(path)[1] if "kind" in content else content


def _result(path: Path) -> Passkey:
    _, result = load_result(path)
    assert isinstance(result, Passkey)
    return result


def _with_tables(root: Path, text: str, tables: Mapping[Path, Callable[[Any], dict[str, str]]]) -> str:
    """The text of a page with the tables of the results that are there."""
    for path, make in tables.items():
        if (root / path).exists():
            for mark, table in make(load_result(root / path)[1]).items():
                text = _with_table(text, mark, table)
    return text


def _with_table(text: str, mark: str, table: str) -> str:
    """The text of a page with this table between its marks."""
    marked = re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", flags=re.DOTALL)
    return marked.sub(lambda _: table, text)


def passkey_table(
    models: Mapping[str, Sequence[Cell]], train_length: int, times: Sequence[float], *, intervals: bool = False
) -> str:
    """Models down, lengths across: the keys found of 100, or of fewer where a model was stopped."""
    lengths = [round(each * train_length) for each in times]
    heads = [f"{length:,} ({multiple(length, train_length)})" for length in lengths]
    rows = [f"| model | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name, cells in models.items():
        by_length = {cell.length: cell for cell in cells}
        rows.append(f"| `{name}` | {' | '.join(_found(by_length.get(length), intervals) for length in lengths)} |")
    return "\n".join(rows) + "\n"


def _found(cell: Cell | None, interval: bool) -> str:
    if cell is None or not cell.trials:
        return "–"
    found = f"{cell.right:g}" if cell.trials == TRIALS else f"{cell.right:g} of {cell.trials}"
    return f"{found} ({100 * cell.low:.0f}–{100 * cell.high:.0f})" if interval else found


def stale(root: Path = ROOT) -> list[str]:
    """Names of the files that are not what the result files give."""
    return [str(path) for path, made in figures(root).items() if _text(root / path) != made]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    names = stale()
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(names)}; `make figures` remakes them" if names else 0)
    for path, made in figures().items():
        write_whole(ROOT / path, made)
    print("remade: " + (", ".join(names) or "nothing, all are as the results give them"))
