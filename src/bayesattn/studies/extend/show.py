"""Ways to read past the training length as tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bayesattn.data.text import BUNDLED
from bayesattn.drawing.figures import legend_beside, make_figure, save_figure, ticks_at
from bayesattn.drawing.palette import colour, line_style
from bayesattn.drawing.tables import duration, make_table, megabytes, multiple
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name
from bayesattn.studies.extend.run import Extend, Method
from bayesattn.studies.passkey.show import FOUND, models_table
from bayesattn.studies.perplexity.run import Loss
from bayesattn.studies.retrieval_show import accuracy_figure


def tables(result: Extend) -> list[Table | str]:
    lengths = sorted({cell.length for method in result.methods for cell in method.cells})
    parts: list[Table | str] = []
    if lengths:
        settings = result.settings
        title = f"{short_name(result.model)}: pass keys found, {settings['haystack']} haystack, seed {settings['seed']}"
        caption = "95% Wilson intervals; greedy generation on the same prompts"
        cells = {method.method: method.cells for method in result.methods}
        parts += [
            models_table(cells, lengths, result.train_length, title, caption),
            _costs(result, lengths),
        ]
    if any(method.perplexity for method in result.methods):
        parts.append(_perplexities(result))
    return [*parts, *_notes(result)]


def _costs(result: Extend, lengths: list[int]) -> Table:
    """Seconds of a trial, and the memory that it takes besides the model."""
    table = make_table("Time of a trial and its peak memory", "memory: above what the loaded model takes")
    table.add_column("method", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}\n{multiple(length, result.train_length)}", justify="right", no_wrap=True)
    for method in result.methods:
        cells = {cell.length: cell for cell in method.cells}
        peaks = {peak.length: peak.bytes for peak in method.peaks}
        table.add_row(method.method, *(_cost(cells.get(length), peaks.get(length)) for length in lengths))
    return table


def _cost(cell: Cell | None, peak: int | None) -> str:
    if cell is None or not cell.trials:
        return "–" if cell is not None else ""
    return duration(cell.seconds / cell.trials) + ("" if peak is None else f"\n{megabytes(peak)}")


def _perplexities(result: Extend) -> Table:
    """Positions down, methods across."""
    source = "the held-out part of the bundled text" if result.settings["text"] == BUNDLED else result.settings["text"]
    caption = "All methods read the same text; 95% intervals are in the picture and in the result file."
    table = make_table(f"Perplexity of {source}, by position", caption, columns=("from",))
    measured = {method.method: _losses(method) for method in result.methods if method.perplexity is not None}
    for name in measured:
        table.add_column(name.replace("+", "\n+").replace("interpolation", "inter-\npolation"), justify="right")
    for start in sorted({start for rows in measured.values() for start in rows}):
        values = [rows.get(start) for rows in measured.values()]
        table.add_row(f"{start:,}", *("" if row is None else f"{row.perplexity:,.1f}" for row in values))
    return table


def _losses(method: Method) -> dict[int, Loss]:
    """By the position where a part begins."""
    return {} if method.perplexity is None else {row.context: row for row in method.perplexity.rows}


def _notes(result: Extend) -> list[str]:
    settings = result.settings
    sizes = (
        f"The window has {settings['window']:,} tokens, the factor is {settings['factor']:g}, groups have "
        f"{settings['group']:,} tokens, and window+sinks keeps {settings['sinks']:,} first tokens."
    )
    notes = [f"{method.method}: {method.what}{_share(method)}" for method in result.methods]
    for method in result.methods:
        notes += [f"{method.method}, {cell.length:,} tokens: {cell.note}" for cell in method.cells if cell.note]
    return [sizes, *notes]


def _share(method: Method) -> str:
    """How many heads look only near, if that is some."""
    return "" if method.near is None else f" ({len(method.near):,} heads, those but the costliest {method.keep:.0%})"


def markdown(result: Extend) -> dict[str, str]:
    """Tables of a page, by their marks: pass keys, perplexity by position, and memory; methods down."""
    name = short_name(result.model)
    lengths = sorted({cell.length for method in result.methods for cell in method.cells})
    columns = [f"{length:,} ({multiple(length, result.train_length)})" for length in lengths]
    keys, peaks = [], []
    for method in result.methods:
        cells = {cell.length: cell for cell in method.cells}
        of_length = {peak.length: peak.bytes for peak in method.peaks}
        keys.append([_method(method), *(_found(cells.get(length)) for length in lengths)])
        peaks.append([_method(method), *(megabytes(of_length[each]) if each in of_length else "–" for each in lengths)])
    tables = {
        f"extend {name} keys": markdown_table(["pass keys found", *columns], keys),
        f"extend {name} memory": markdown_table(["peak memory", *columns], peaks),
    }
    by_start = {_method(method): _losses(method) for method in result.methods if method.perplexity is not None}
    starts = sorted({start for losses in by_start.values() for start in losses})
    if starts:  # from the first part on, each farther one twice as far away, and the last
        shown = [start for place, start in enumerate(starts) if place & (place - 1) == 0 or place == len(starts) - 1]
        rows = [
            [each, *(f"{losses[start].perplexity:,.1f}" if start in losses else "–" for start in shown)]
            for each, losses in by_start.items()
        ]
        columns = [f"from {start:,}" for start in shown]
        tables[f"extend {name} perplexity"] = markdown_table(["perplexity", *columns], rows)
    return tables


def _method(method: Method) -> str:
    share = "" if method.keep is None else f", {method.keep:.0%} of heads"
    return f"`{method.method}`{share}"


def _found(cell: Cell | None) -> str:
    if cell is None or not cell.trials:
        return "–"
    return f"{cell.right:g} of {cell.trials} ({100 * cell.low:.0f}–{100 * cell.high:.0f})"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown whose first column has names."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figures(result: Extend, folder: Path) -> list[Path]:
    drawn: list[Path] = []
    cells = {method.method: method.cells for method in result.methods}
    if any(cell.trials for some in cells.values() for cell in some):
        drawn += accuracy_figure(cells, result.train_length, folder / "extend", FOUND)
    if any(method.perplexity for method in result.methods):
        drawn += _perplexity_figure(result, folder)
    return drawn


def _perplexity_figure(result: Extend, folder: Path) -> list[Path]:
    """Perplexity against position, one line per method, with 95% intervals."""
    figure = make_figure(width=9, height=4.8)
    axes = figure.add_subplot(1, 1, 1)
    for place, method in enumerate(result.methods):
        if method.perplexity is None:
            continue
        rows = method.perplexity.rows
        at = [row.context for row in rows]
        axes.fill_between(at, [row.low for row in rows], [row.high for row in rows], color=colour(place), alpha=0.12)
        axes.plot(at, [row.perplexity for row in rows], label=method.method, **line_style(place, mark=True))
    axes.axvline(result.train_length, color="#999999", linewidth=1)
    axes.set(xlabel="position", ylabel="perplexity", yscale="log")
    starts = sorted({start for method in result.methods for start in _losses(method)})
    ticks_at(axes, starts[:: max(1, len(starts) // 8)])
    axes.grid(alpha=0.25)
    legend_beside(axes)
    return save_figure(figure, folder / "extend-perplexity")
