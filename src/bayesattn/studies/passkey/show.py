"""Pass-key retrieval as tables, pictures, and a section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bayesattn.drawing import html, svg
from bayesattn.drawing.figures import make_figure, save_figure, share_map
from bayesattn.drawing.tables import make_table, multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name
from bayesattn.studies.passkey.run import Passkey
from bayesattn.studies.retrieval_show import accuracy_figure, cells_table, curves, names_of

# Bins of the depth of a key.
DEPTHS = 10
FOUND = "keys found, all digits right"


def tables(result: Passkey) -> list[Table | str]:
    title = f"{short_name(result.model)}: {result.title}, seed {result.settings['seed']}"
    parts: list[Table | str] = [cells_table(result.cells, result.train_length, title)]
    if result.dense is not None:
        parts.append(
            "One prompt of {length:,} tokens: {seconds:.2f} s to the first token; with dense attention "
            "{dense_seconds:.1f} s, {ratio:.0f} times that; logits differ by {error:.0e}.".format(**result.dense)
        )
    return parts


def figures(result: Passkey, folder: Path) -> list[Path]:
    name = short_name(result.model)
    curve = accuracy_figure({name: result.cells}, result.train_length, folder / "passkey", FOUND)
    return curve + _depths_figure(result.cells, name, folder / "depths")


def sections(results: Sequence[Passkey]) -> list[html.Section]:
    """Models measured in the same way share a chart."""
    groups: dict[str, list[Passkey]] = {}
    for result in results:
        groups.setdefault(result.title, []).append(result)
    parts = [curves(title, group, "right", "Keys found, all digits right", "right") for title, group in groups.items()]
    maps = [
        _depths_chart(f"{name}, {title}", result.cells)
        for title, group in groups.items()
        for name, result in zip(names_of(group, seeds=True), group, strict=True)
    ]
    parts += [html.heading("By depth"), Markup('<div class="maps">{}</div>').format(html.joined(maps))]
    return [html.Section("retrieval", "Retrieval", html.joined(parts))]


def models_table(
    results: Mapping[str, Sequence[Cell]],
    lengths: Sequence[int],
    train_length: int,
    title: str,
    caption: str | None = None,
) -> Table:
    """Models down, lengths across: how many of the trials were right, and the 95% interval of the share."""
    table = make_table(title, caption)
    table.add_column("model", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}\n{multiple(length, train_length)}", justify="right", no_wrap=True)
    for name, cells in results.items():
        by_length = {cell.length: cell for cell in cells}
        table.add_row(name, *(_outcome(by_length.get(length)) for length in lengths))
    return table


def _outcome(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return "–" if cell.accuracy is None else f"{cell.right:g}/{cell.trials}\n{cell.low:.0%}…{cell.high:.0%}"


def by_depth(cells: Sequence[Cell]) -> list[list[tuple[float, int] | None]]:
    """Sum of the scores and number of the trials, by bin of the depth and by cell; None without trials."""
    scores = [
        [[score for depth, score in cell.outcomes if min(DEPTHS - 1, int(depth * DEPTHS)) == bin_] for cell in cells]
        for bin_ in range(DEPTHS)
    ]
    return [[(sum(field), len(field)) if field else None for field in row] for row in scores]


def _bin_names() -> list[str]:
    return [f"{row * 100 // DEPTHS}–{(row + 1) * 100 // DEPTHS}%" for row in range(DEPTHS)]


def _depths_figure(cells: Sequence[Cell], name: str, path: Path) -> list[Path]:
    """Accuracy by depth and length; each field has the share and the number of trials."""
    tried = [cell for cell in cells if cell.trials]
    figure = make_figure(width=2.2 + 0.9 * len(tried), height=5)
    axes = figure.add_subplot(1, 1, 1)
    fields = by_depth(tried)
    shares = [[None if field is None else field[0] / field[1] for field in row] or [None] for row in fields]
    labels = [["" if field is None else f"{field[0] / field[1]:.0%}\nof {field[1]}" for field in row] for row in fields]
    share_map(axes, shares, labels, size=6.5)
    axes.set_xticks(range(len(tried)), [f"{cell.length:,}" for cell in tried], rotation=45)
    axes.set_yticks(range(DEPTHS), _bin_names())
    axes.set(title=f"{name}: keys found", xlabel="tokens of the prompt", ylabel="depth of the key")
    return save_figure(figure, path)


def _depths_chart(title: str, cells: Sequence[Cell]) -> Markup:
    tried = [cell for cell in cells if cell.trials]
    columns = [f"{cell.length:,}" for cell in tried]
    return Markup('<figure style="--wide: {}px"><figcaption>{}</figcaption>{}</figure>').format(
        svg.heat_width(len(columns)), title, svg.heat(title, columns, _bin_names(), by_depth(tried))
    )
