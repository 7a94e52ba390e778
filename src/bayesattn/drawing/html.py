"""Parts of the page: sections, tables that sort, charts with their keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup
from rich.table import Table


class Cell(NamedTuple):
    """A cell of a table: its text, the value to sort by, and whether the text is words instead of a number."""

    text: str
    value: float | str
    words: bool = False


@dataclass(frozen=True)
class Section:
    """A section of the page: the anchor, the heading, and what is below it."""

    anchor: str
    title: str
    body: Markup


def words(text: str) -> Cell:
    return Cell(text, text, True)


def count(value: float) -> Cell:
    return Cell(f"{value:,}", value)


def share(value: float) -> Cell:
    return Cell(f"{value:.1%}", value)


def number(value: float | None) -> Cell:
    return Cell("–", -math.inf) if value is None else Cell(f"{value:.3g}", value)


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("\n").join(parts)


def heading(text: str) -> Markup:
    return Markup("<h3>{}</h3>").format(text)


def paragraph(text: str, *, soft: bool = False) -> Markup:
    return Markup('<p class="soft">{}</p>' if soft else "<p>{}</p>").format(text)


def figure(chart: Markup, key: Markup) -> Markup:
    return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(chart, key)


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table whose heads are buttons that sort it."""
    top = Markup("").join(
        Markup('<th scope="col"{}><button type="button">{}</button></th>').format(
            _of_words(rows[0][at] if rows else None), head
        )
        for at, head in enumerate(heads)
    )
    body = Markup("\n").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td{} data-value="{}">{}</td>').format(_of_words(cell), cell.value, cell.text) for cell in row
            )
        )
        for row in rows
    )
    return Markup(
        '<div class="scroll"><table class="sortable"><caption><span>{}</span></caption>\n'
        "<thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table></div>"
    ).format(caption, top, body)


def from_terminal(parts: Iterable[Table | str]) -> Markup:
    """Tables and sentences for the terminal, as parts of the page."""
    return joined(paragraph(part) if isinstance(part, str) else _from_table(part) for part in parts)


def _from_table(part: Table) -> Markup:
    heads = [" ".join(str(column.header).split()) for column in part.columns]
    columns = [
        [_by_number(str(text)) if column.justify == "right" else words(str(text)) for text in column.cells]
        for column in part.columns
    ]
    return heading(str(part.title)) + table(str(part.caption or ""), heads, list(zip(*columns, strict=True)))


def _by_number(text: str) -> Cell:
    """A cell that is sorted by the first number in it."""
    first = re.search(r"[−+-]?[\d,]*\.?\d+(e[+-]?\d+)?", text)
    return Cell(text, float(first[0].replace(",", "").replace("−", "-")) if first else -math.inf)


def _of_words(cell: Cell | None) -> Markup:
    return Markup(' class="words"') if cell is not None and cell.words else Markup("")
