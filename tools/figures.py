"""Remake README's picture and tables of pages from the result files in docs/data, and pictures for dark pages.

python tools/figures.py          write them
python tools/figures.py --check  only say which are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bayesattn.drawing import palette
from bayesattn.drawing.tables import duration, megabytes, multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name, write_whole
from bayesattn.studies.bench.conditioned.run import Conditioned, Peer, Timing
from bayesattn.studies.bench.runs import FORWARD, TRAINING
from bayesattn.studies.passkey.run import Passkey
from bayesattn.studies.passkey.show import FOUND
from bayesattn.studies.results import load_result
from bayesattn.studies.retrieval_show import accuracy_figure
from bayesattn.studies.variants.run import Variants
from bayesattn.studies.variants.show import markdown

ROOT = Path(__file__).parents[1]
README, RESULTS, PICTURE = Path("README.md"), Path("docs/results.md"), Path("docs/images/passkey.svg")
MODELS = ("bam-tiny", "alibi-tiny", "rope-tiny", "nope-tiny", "sinusoidal-tiny")
TIMES = (1, 4, 16, 64, 500)
CONDITIONED = Path("docs/data/bench-conditioned.json")
VARIANTS = Path("docs/data/variants.json")
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
    for mark, table in conditioned_tables(_conditioned(root / CONDITIONED)).items():
        on_results = _with_table(on_results, mark, table)
    if (root / VARIANTS).exists():
        on_results = _with_table(on_results, "variants", variants_tables(root / VARIANTS))
    pages = {README: _with_table(readme, "passkey", passkey_table(cells, train_length, TIMES)), RESULTS: on_results}
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


def _result(path: Path) -> Passkey:
    _, result = load_result(path)
    assert isinstance(result, Passkey)
    return result


def _conditioned(path: Path) -> Conditioned:
    _, result = load_result(path)
    assert isinstance(result, Conditioned)
    return result


def variants_tables(path: Path) -> str:
    """All tables of `bayesattn variants`, in Markdown."""
    _, result = load_result(path)
    assert isinstance(result, Variants)
    return markdown(result)


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


def conditioned_tables(result: Conditioned) -> dict[str, str]:
    """Both phases under every prior, and the layers of Inkling, by the marks of the tables."""
    forward = [row for row in result.rows if row.phase == FORWARD]
    training = [row for row in result.rows if row.phase == TRAINING]
    return {
        "conditioned forward": _table(
            ("tokens", "prior", "plain SDPA", "bayesattn", "memory"), map(_timing, forward), left=2
        ),
        "conditioned training": _table(
            ("tokens", "prior", "dense autograd", "bayesattn", "memory"), map(_timing, training), left=2
        ),
        "conditioned inkling": _table(
            ("tokens", "layer", "transformers", "bayesattn", "memory, transformers", "memory, bayesattn"),
            map(_peer, result.inkling), left=2,
        ),
    }  # fmt: skip


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """A table in Markdown whose column `left` has words and the others numbers; nothing without rows."""
    rows = list(rows)
    if not rows:
        return ""
    line = "|".join("---" if number == left else "---:" for number in range(1, len(heads) + 1))
    return "\n".join([f"| {' | '.join(heads)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _timing(row: Timing) -> list[str]:
    timed = row.seconds is not None
    baseline = row.note if timed and row.baseline_seconds is None else _seconds(row.baseline_seconds)
    time = _multiple(row.seconds, row.baseline_seconds) if timed else row.note
    return [f"{row.tokens:,}", row.prior, baseline, time, _megabytes(row.peak_bytes)]


def _peer(row: Peer) -> list[str]:
    time = _multiple(row.seconds, row.peer_seconds) if row.seconds is not None else row.note
    memory = _megabytes(row.peak_bytes)
    if row.peak_bytes and row.peer_peak_bytes:
        memory = f"**{row.peak_bytes / row.peer_peak_bytes:.1%}** {memory}"
    return [f"{row.tokens:,}", row.layer, _seconds(row.peer_seconds), time, _megabytes(row.peer_peak_bytes), memory]


def _multiple(seconds: float | None, baseline: float | None) -> str:
    return f"**{seconds / baseline:.2f}×** {duration(seconds)}" if seconds and baseline else _seconds(seconds)


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def _megabytes(number: int | None) -> str:
    return "–" if number is None else megabytes(number)


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
