"""Tables for the terminal, and how numbers are written."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

# The widest window that a prior can have, which stands for none.
EVERYTHING = 2**24


def make_table(title: str, caption: str | None, min_width: int | None = None, columns: Sequence[str] = ()) -> Table:
    """A table in the common style, with columns of numbers."""
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=min_width,
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def multiple(length: int, train_length: int) -> str:
    """A length as a multiple of the training length, `16×` or `1.3×`."""
    ratio = length / train_length
    return f"{ratio:,.0f}×" if ratio >= 10 or ratio == int(ratio) else f"{ratio:.1f}×"


def amount(number: float) -> str:
    """A number with a unit: `15T`, `100B`."""
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if number >= s), ("", 1.0))
    return f"{number / size:.4g}{unit}"


def duration(seconds: float) -> str:
    """Two to three digits and a unit: `26 µs`, `9.8 ms`, `12.3 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "µs")
    return f"{value:.{0 if value >= 10 else 1}f} {unit}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def with_error(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"


def parameters_text(parameters: dict[str, float | None]) -> str:
    """`beta 0.5, scale 8`, without those that a head has not. A width of all distances is `width all`."""
    known = {key: value for key, value in parameters.items() if value is not None and value == value}
    return ", ".join(f"{key} {_parameter(key, value)}" for key, value in known.items())


def _parameter(name: str, value: float) -> str:
    if name == "width":
        return "all" if value >= EVERYTHING else f"{value:,.0f}"
    return f"{value:.3g}"
