"""Charts as inline SVG, with text alternatives, marks besides colours, and the colours of the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from bayesattn.drawing.palette import dash

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 36, 16, 64
WIDE_CHARACTER = 13  # of a label on a phone, where letters are larger, in the units of the chart
SHAPES = ("circle", "square", "triangle", "diamond")
HEAT_CELL, HEAT_LEFT = 72, 70  # width of a field, and of the labels to the left of the first, in pixels


@dataclass(frozen=True)
class Point:
    """A point with its interval, and the label that shows when the mouse is over it."""

    x: float
    y: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Axis:
    """An axis from `least` to `most`, linear or logarithmic."""

    least: float
    most: float
    ticks: Sequence[tuple[float, str]]
    label: str
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Position of a value on the axis: 0 at `least`, 1 at `most`."""
        least, most = (math.log(x) if self.logarithmic else x for x in (self.least, self.most))
        at = math.log(max(value, self.least)) if self.logarithmic else value
        return min(1.0, max(0.0, (at - least) / (most - least) if most > least else 0.5))


def log_axis(values: Sequence[float], label: str, *, powers: bool = False) -> Axis:
    """Ticks at the values themselves, or at powers of ten."""
    least, most = min(values), max(values)
    if least == most:
        least, most = least / 2, most * 2
    if powers:
        exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [(10.0**e, f"{10.0**e:g}") for e in exponents if least <= 10.0**e <= most]
    else:
        ticks = [(value, f"{value:,.0f}") for value in sorted(set(values))]
    return Axis(least, most, ticks, label, logarithmic=True)


def shares(label: str) -> Axis:
    """An axis of shares, from 0 to 100%."""
    return Axis(0, 1, [(share / 4, f"{25 * share}%") for share in range(5)], label)


def _apart(labels: Sequence[tuple[float, str]]) -> set[str]:
    """Labels below an axis that do not touch, from the left; the last one always."""
    free, shown = -math.inf, set()
    last = labels[-1][0] - WIDE_CHARACTER * len(labels[-1][1]) / 2 if labels else 0.0
    for number, (at, text) in enumerate(labels, 1):
        half = WIDE_CHARACTER * len(text) / 2
        if number == len(labels) or (at - half >= free and at + half <= last):
            shown.add(text)
            free = at + half
    return shown


def lines(
    title: str, series: Sequence[tuple[str, Sequence[Point]]], x: Axis, y: Axis, *, marked: bool = True
) -> Markup:
    """A line for each series, each with its own colour, dash and mark."""

    def across(value: float) -> float:
        return LEFT + x.place(value) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM)

    parts = [_frame(title, [name for name, _ in series])]
    for value, text in y.ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(value):.1f}" y2="{down(value):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{down(value) + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    shown = _apart([(across(value), text) for value, text in x.ticks])
    for value, text in x.ticks:
        at = across(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        if text in shown:
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 24}" text-anchor="middle">{escape(text)}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x.label)}</text>')
    half = (HEIGHT - BOTTOM + TOP) / 2
    turned = f'x="14" y="{half}" text-anchor="middle" transform="rotate(-90 14 {half})"'
    parts.append(f'<text class="label" {turned}>{escape(y.label)}</text>')
    for number, (_, points) in enumerate(series):
        path = " ".join(f"{'L' if i else 'M'}{across(p.x):.1f} {down(p.y):.1f}" for i, p in enumerate(points))
        pattern = " ".join(map(str, dash(number)))
        parts.append(f'<path class="series c{number % 8}" d="{path}" stroke-dasharray="{pattern}"/>')
        for point in points if marked else ():
            at = across(point.x)
            parts.append(
                f'<line class="interval c{number % 8}" x1="{at:.1f}" x2="{at:.1f}" y1="{down(point.low):.1f}" '
                f'y2="{down(point.high):.1f}"/>'
            )
            parts.append(
                f'<g class="point c{number % 8}" tabindex="0" data-label="{escape(point.label)}">'
                f"<title>{escape(point.label)}</title>{_mark(SHAPES[number % 4], at, down(point.y))}</g>"
            )
    return Markup("".join(parts) + "</svg>")


def _frame(title: str, names: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    description = f"{title}: {', '.join(names)}. The table beside it has the numbers." if names else title
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
    )


def _mark(shape: str, x: float, y: float) -> str:
    size = 4.5
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[shape]
    return '<polygon points="' + " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in corners) + '"/>'


def key(names: Sequence[str], *, marked: bool = True) -> Markup:
    """The legend of a chart: each line with its dash, mark and name."""
    entries = []
    for number, name in enumerate(names):
        pattern = " ".join(map(str, dash(number)))
        mark = f'<g class="point c{number % 8}">{_mark(SHAPES[number % 4], 20, 7)}</g>' if marked else ""
        entries.append(
            f'<li><svg viewBox="0 0 40 14" aria-hidden="true"><path class="series c{number % 8}" d="M0 7 L40 7" '
            f'stroke-dasharray="{pattern}"/>{mark}</svg>{escape(name)}</li>'
        )
    return Markup(f'<ul class="key">{"".join(entries)}</ul>')


def heat_width(columns: int) -> int:
    """Width of a heat map in pixels, at the size of other text."""
    return HEAT_LEFT + HEAT_CELL * max(1, columns) + 8


def heat(
    title: str, columns: Sequence[str], rows: Sequence[str], shares: Sequence[Sequence[tuple[float, int] | None]]
) -> Markup:
    """A heat map of shares; each field has (right, trials), by row and column."""
    cell, tall, left = HEAT_CELL, 24, HEAT_LEFT
    width, height = heat_width(len(columns)), tall * (len(rows) + 1) + 8
    parts = [_frame(title, [], width, height)]
    for j, column in enumerate(columns):
        parts.append(
            f'<text class="tick" x="{left + cell * (j + 0.5)}" y="16" text-anchor="middle">{escape(column)}</text>'
        )
    for i, row in enumerate(rows):
        y = tall * (i + 1)
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 16}" text-anchor="end">{escape(row)}</text>')
        for j, outcome in enumerate(shares[i]):
            if outcome is None:
                continue
            right, trials = outcome
            share = right / trials
            label = f"{title}, {columns[j]} tokens, depth {row}: {right:g} of {trials}"
            strong = " strong" if share > 0.55 else ""
            parts.append(
                f'<g class="field{strong}" tabindex="0" data-label="{escape(label)}"><title>{escape(label)}</title>'
                f'<rect x="{left + cell * j}" y="{y}" width="{cell - 2}" height="{tall - 2}" '
                f'style="fill-opacity:{share:.2f}"/>'
                f'<text x="{left + cell * (j + 0.5) - 1}" y="{y + 15}" text-anchor="middle">{right:g}/{trials}</text>'
                "</g>"
            )
    return Markup("".join(parts) + "</svg>")
