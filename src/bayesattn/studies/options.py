"""Options that studies share, and how their values are parsed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from bayesattn.errors import UserError, shown


def not_empty(value: str | None) -> str | None:
    """For options that name something."""
    if value is not None and not value.strip():
        raise typer.BadParameter(f"{value!r}; a name is needed")
    return value


def finite(value: float) -> float:
    """For options with a number: `nan` and `inf` would pass all checks of their range."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value}; a finite number is needed")
    return value


Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON to FILE.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and pictures.")]
RunOut = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder for results and pictures; in runs/ by default, named for what is measured."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        callback=not_empty,
        metavar="MODEL",
        help="A shipped name, a folder, or a Hugging Face id. Append +yarn:16 (or linear, dynamic) to scale rotary "
        "positions to 16 times the length, or +clip:2048 to score far keys at the distance 2,048.",
    ),
]
Multiples = Annotated[
    str, typer.Option(metavar="N,Nx,…", help="Numbers of tokens, or multiples of the training length: 1x,16x,65536.")
]
Trials = Annotated[int, typer.Option(min=1, max=10**6, help="Number of trials at each length.")]
Stop = Annotated[bool, typer.Option(help="Stop at a length where none of the first trials is right.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        callback=not_empty,
        metavar="NAME",
        help="Tokenizer for a model without one: a shipped name, a folder or a Hugging Face id.",
    ),
]
Text = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="A text file or a folder of text files; by default the held-out part of the bundled text.",
    ),
]
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Measure as much as fits into this time: 90s, 10m, 2h.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")]


def parse_seconds(text: str) -> float:
    """`90s`, `10m` or `2h`."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        number = float(text[:-1]) * (unit or 0.0)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise UserError(f"--budget is {shown(text)}; give a time such as 90s, 10m or 2h")
    return number


def parse_multiples(text: str, train_length: int, least: int = 1) -> list[int]:
    """`1x,16x,65536` as tokens."""
    sizes: set[int] = set()
    for part in text.lower().replace("×", "x").split(","):
        try:
            number = float(part[:-1]) * train_length if part.endswith("x") else int(part)
        except ValueError:
            number = -1
        if not least <= number < 2**40 or 0 < number < 1:
            raise UserError(
                f"--lengths has {shown(part)}; give numbers of tokens, or multiples of the training length such as "
                "16x, with commas between them"
            )
        sizes.add(round(number))
    return sorted(sizes)


def parse_lengths(text: str, most: int, option: str = "--lengths") -> list[int]:
    """Numbers of tokens with commas between them."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 64 or sizes[-1] > most:
        raise UserError(
            f"{option} is {shown(text)}; give whole numbers of tokens, at least 64 and at most {most:,} in this "
            "machine's memory, with commas between them"
        )
    return sizes


def parse_count(text: str, option: str) -> int:
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= 1000:
        raise UserError(f"{option} is {shown(text)}; a whole number from 1 to 1000 is needed")
    return int(text)


def parse_grid(text: str, points: int) -> list[int]:
    """`1000-30000` as that many lengths in a geometric series."""
    from bayesattn.studies.convergence.fits import grid

    least, _, most = text.partition("-")
    if not all(part.isdecimal() and len(part) <= 10 and int(part) < 2**31 for part in (least, most)):
        raise UserError(f"--lengths is {shown(text)}; give two numbers of tokens such as 1000-30000")
    return grid(int(least), int(most), points)


def parse_range(text: str, option: str) -> tuple[float, float]:
    """`0.05-50` as two numbers."""
    least, _, most = text.partition("-")
    try:
        bounds = float(least), float(most)
    except ValueError:
        bounds = (0.0, 0.0)
    if not 0 < bounds[0] < bounds[1] < 1e6:
        raise UserError(f"{option} is {shown(text)}; give two positive numbers such as 0.05-50")
    return bounds


def parse_numbers(text: str, option: str, infinite: bool = False) -> list[float]:
    """`1,2,inf` as numbers in rising order."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < x < 1e6 or (infinite and x == math.inf) for x in numbers):
        raise UserError(f"{option} is {shown(text)}; give positive numbers with commas between them, below 1e6")
    return numbers
