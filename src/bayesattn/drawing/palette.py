"""The colours, dashes and marks of all pictures. A dash and a mark each, for colour-blind readers and print in grey."""

from __future__ import annotations

from typing import Any

LIGHT = ("#0b6e99", "#c2364a", "#24753a", "#7a55b0", "#a8640a", "#4a4a4a", "#007f7f", "#8c4320")
DARK = ("#4db3dd", "#f2788a", "#6cc384", "#b79be6", "#e0a14d", "#c3c7cc", "#4fc9c9", "#dd9873")
# Lengths of dashes and gaps.
DASHES = ((), (7, 3), (2, 3), (7, 3, 2, 3), (1, 2), (10, 4), (4, 2), (12, 3, 2, 3))
MARKS = "os^DvP*X"  # of matplotlib


def colour(number: int) -> str:
    return LIGHT[number % len(LIGHT)]


def dash(number: int) -> tuple[int, ...]:
    return DASHES[number % len(DASHES)]


def line_style(number: int, *, mark: bool = False) -> dict[str, Any]:
    """Arguments of matplotlib's plot for the line of this number."""
    pattern = dash(number)
    style: dict[str, Any] = {"color": colour(number), "linestyle": (0, pattern) if pattern else "-"}
    return {**style, "marker": MARKS[number % len(MARKS)]} if mark else style


def css() -> str:
    """Variables --c0, --c1, … for light and dark pages, and the classes of lines and marks."""
    light, dark = (" ".join(f"--c{n}: {value};" for n, value in enumerate(each)) for each in (LIGHT, DARK))
    classes = "".join(
        f".c{n}.series, .c{n}.interval {{ stroke: var(--c{n}); }} .c{n}.point {{ fill: var(--c{n}); }}\n"
        for n in range(len(LIGHT))
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}"
