"""Options that commands share, and how their values are parsed."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from bayesattn.benchmarks.inputs import Shape
from bayesattn.errors import shown
from bayesattn.files import short_name


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


Json = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write the results as JSON to FILE.")]  # noqa: UP045
Model = Annotated[
    str,
    typer.Argument(
        callback=not_empty,
        metavar="MODEL",
        help="A shipped name, a folder, or a Hugging Face id. Append +yarn:16 (or linear, dynamic) to scale rotary "
        "positions to 16 times the length.",
    ),
]
Lengths = Annotated[
    str, typer.Option(metavar="N,Nx,…", help="Numbers of tokens, or multiples of the training length: 1x,16x,65536.")
]
Tokenizer = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        callback=not_empty,
        metavar="NAME",
        help="Tokenizer for a model without one: a shipped name, a folder or a Hugging Face id.",
    ),
]
Budget = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="TIME", help="Plan the trials to fit into this time: 90s, 10m, 2h."),
]
RunOut = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Folder for results and pictures; runs/COMMAND-MODEL by default."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and pictures.")]


def quiet() -> None:
    """Switch off the messages of transformers that do not concern the user."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def make_console() -> Console:
    """The terminal. Names of models and files are printed as they are, brackets and colons included."""
    return Console(markup=False, emoji=False)


def parse_lengths(text: str, most: int, option: str = "--lengths") -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 64 or sizes[-1] > most:
        raise typer.BadParameter(
            f"{shown(text)}; give whole numbers of tokens, at least 64 and at most {most:,} in this machine's memory, "
            "with commas between them",
            param_hint=option,
        )
    return sizes


def parse_shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for part in text.split(","):
        try:
            shapes.append(Shape.parse(part))
        except ValueError:
            raise typer.BadParameter(
                f"{shown(part)}; give shapes such as 16x4x128x32 that fit in this machine's memory, with commas "
                "between them",
                param_hint="--shapes",
            ) from None
    return tuple(shapes)


def parse_multiples(text: str, train_length: int, least: int = 1) -> list[int]:
    """`1x,16x,65536` as tokens."""
    sizes: set[int] = set()
    for part in text.lower().replace("×", "x").split(","):
        try:
            number = float(part[:-1]) * train_length if part.endswith("x") else int(part)
        except ValueError:
            number = -1
        if not least <= number < 2**40 or 0 < number < 1:
            raise typer.BadParameter(
                f"{shown(part)}; give numbers of tokens, or multiples of the training length such as 16x, with commas "
                "between them",
                param_hint="--lengths",
            )
        sizes.add(round(number))
    return sorted(sizes)


def parse_needles(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return parse_count(least, "--keys"), parse_count(most or least, "--keys")


def parse_count(text: str, option: str) -> int:
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= 1000:
        raise typer.BadParameter(f"{shown(text)}; a whole number from 1 to 1000 is needed", param_hint=option)
    return int(text)


def parse_seconds(text: str) -> float:
    """`90s`, `10m` or `2h`."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        number = float(text[:-1]) * (unit or 0.0)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"{shown(text)}; give a time such as 90s, 10m or 2h", param_hint="--budget")
    return number


def parse_range(text: str, option: str) -> tuple[float, float]:
    """`0.05-50` as two numbers."""
    least, _, most = text.partition("-")
    try:
        bounds = float(least), float(most)
    except ValueError:
        bounds = (0.0, 0.0)
    if not 0 < bounds[0] < bounds[1] < 1e6:
        raise typer.BadParameter(f"{shown(text)}; give two positive numbers such as 0.05-50", param_hint=option)
    return bounds


def parse_numbers(text: str, option: str, infinite: bool = False) -> list[float]:
    """`1,2,inf` as numbers in rising order."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < x < 1e6 or (infinite and x == math.inf) for x in numbers):
        raise typer.BadParameter(
            f"{shown(text)}; give positive numbers with commas between them, below 1e6", param_hint=option
        )
    return numbers


def run_folder(command: str, model: str, options: dict[str, tuple[object, object]]) -> Path:
    """runs/COMMAND-MODEL, then each option (value, default) with another value: one folder per evaluation."""
    parts = [f"{key}-{Path(str(value)).name}" for key, (value, default) in options.items() if value != default]
    return Path("runs") / "-".join([command, short_name(model), *parts])


def typed_command() -> str:
    """The command as it was typed."""
    return shlex.join(["bayesattn", *sys.argv[1:]])
