"""Remake the table and the picture of README from the result files in docs/data.

python tools/figures.py          write them
python tools/figures.py --check  only say which are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bayesattn.drawing.tables import multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name, write_whole
from bayesattn.studies.passkey.run import Passkey
from bayesattn.studies.passkey.show import FOUND
from bayesattn.studies.results import load_result
from bayesattn.studies.retrieval_show import accuracy_figure

ROOT = Path(__file__).parents[1]
README, PICTURE = Path("README.md"), Path("docs/images/passkey.svg")
MODELS = ("bam-tiny", "alibi-tiny", "rope-tiny", "nope-tiny", "sinusoidal-tiny")
TIMES = (1, 4, 16, 64, 500)
TRIALS = 100


def figures(root: Path = ROOT) -> dict[Path, str]:
    """Every file that is made, by its path under the root, with what it should hold."""
    results = [_result(root / "docs" / "data" / f"passkey-{name}.json") for name in MODELS]
    cells = {short_name(result.model): result.cells for result in results}
    train_length = results[0].train_length
    readme = re.sub(
        r"(?<=<!-- passkey -->\n).*?(?=<!-- /passkey -->)",
        lambda _: passkey_table(cells, train_length),
        (root / README).read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    with TemporaryDirectory() as folder:
        _, picture = accuracy_figure(cells, train_length, Path(folder) / PICTURE.stem, FOUND)
        return {README: readme, PICTURE: picture.read_text(encoding="utf-8")}


def _result(path: Path) -> Passkey:
    _, result = load_result(path)
    assert isinstance(result, Passkey)
    return result


def passkey_table(models: Mapping[str, Sequence[Cell]], train_length: int) -> str:
    """Models down, lengths across: the keys found of 100, or of fewer where a model was stopped."""
    lengths = [times * train_length for times in TIMES]
    heads = [f"{length:,} ({multiple(length, train_length)})" for length in lengths]
    rows = [f"| model | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name, cells in models.items():
        by_length = {cell.length: cell for cell in cells}
        rows.append(f"| `{name}` | {' | '.join(_found(by_length.get(length)) for length in lengths)} |")
    return "\n".join(rows) + "\n"


def _found(cell: Cell | None) -> str:
    if cell is None or not cell.trials:
        return "–"
    return f"{cell.right:g}" if cell.trials == TRIALS else f"{cell.right:g} of {cell.trials}"


def stale(root: Path = ROOT) -> list[str]:
    """Names of the files that are not what the result files give."""
    return [str(path) for path, made in figures(root).items() if (root / path).read_text(encoding="utf-8") != made]


if __name__ == "__main__":
    names = stale()
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(names)}; `make figures` remakes them" if names else 0)
    for path, made in figures().items():
        write_whole(ROOT / path, made)
    print("remade: " + (", ".join(names) or "nothing, all are as the results give them"))
