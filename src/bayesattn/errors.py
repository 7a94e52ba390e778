"""Errors that a user can correct."""

from __future__ import annotations

import difflib
import reprlib
import textwrap
from collections.abc import Sequence


class UserError(ValueError):
    """One sentence: what was given and what is allowed. The command line prints it and exits with code 2."""


# Characters of an error message.
LONGEST_MESSAGE = 300
# Characters of a list of settings in a message.
_LONGEST_LIST = 160
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """A value as an error message quotes it: on one line, and short."""
    return " ".join(_SHORT.repr(value).split())


def is_number(value: object) -> bool:
    """Whether it is a finite real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e308 < value < 1e308


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether it is an integer in this range, both ends included; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def no_setting(section: str, key: object, known: Sequence[str]) -> str:
    """The sentence for an unknown setting, with the most similar known one."""
    near = difflib.get_close_matches(str(key)[:100], known, n=1)
    names = textwrap.shorten(", ".join(known), _LONGEST_LIST, placeholder=" …")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {names}"
    return f"{section} has no setting {shown(key)}{hint}"


def first_line(problem: Exception) -> str:
    """The first line of an error message of another library."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def one_line(message: str) -> str:
    """A message on one line, cut off where it is longer than any of ours."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"
