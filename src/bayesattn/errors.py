"""Errors that a user can correct."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class UserError(ValueError):
    """One sentence: what was given and what is allowed. The command line prints it and exits with code 2."""


def no_setting(section: str, key: object, known: Sequence[str]) -> str:
    """The sentence for an unknown setting, with the most similar known one."""
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
    return f"{section} has no setting {key!r}{hint}"


def first_line(problem: Exception) -> str:
    """The first line of an error message of another library."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
