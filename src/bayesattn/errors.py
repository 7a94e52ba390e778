"""Errors that a user can correct."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import textwrap
import types
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin


class UserError(ValueError):
    """One sentence: what was given and what is allowed. The command line prints it and exits with code 2."""


class NotFiniteError(UserError):
    """Numbers that are NaN, infinite, or too large to compute with."""


# Characters of an error message.
LONGEST_MESSAGE = 300
# Characters of a list of settings in a message.
_LONGEST_LIST = 160
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """A value as an error message quotes it: on one line, and short."""
    return cut(_SHORT.repr(value), 120)


def is_number(value: object) -> bool:
    """Whether it is a finite real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and -1e308 < value < 1e308  # type: ignore[operator]


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether it is an integer in this range, both ends included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most  # type: ignore[operator]


def check_flags(**flags: object) -> None:
    """Raise an error for one that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {shown(flag)}; True or False is needed")


def no_setting(section: str, key: object, known: Sequence[str]) -> str:
    """The sentence for an unknown setting, with the most similar known one."""
    near = difflib.get_close_matches(str(key)[:100], known, n=1)
    names = textwrap.shorten(", ".join(known), _LONGEST_LIST, placeholder=" …")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {names}"
    return f"{section} has no setting {shown(key)}{hint}"


def cut(text: object, most: int = 80) -> str:
    """Text on one line, without its middle if it is longer than `most` characters."""
    line = " ".join(str(text)[:10_000].split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half].strip()} … {line[-half:].strip()}"


def first_line(problem: Exception) -> str:
    """The first line of an error message of another library, shortened if it is long."""
    lines = str(problem)[:10_000].strip().splitlines()
    return cut(lines[0], 120) if lines else type(problem).__name__


def wrong_type(name: str, value: object, annotation: Any) -> str:
    """The sentence for a setting whose value does not have the type of its annotation."""
    given = list(value) if isinstance(value, tuple) else value  # which a recipe has as a list
    return f"{name} is {shown(given)}; {type_in_words(annotation)} is needed"


def plain_errors(cls: type[Any]) -> type[Any]:
    """Make the type errors of a dataclass that is `strict` one sentence: what was given, what is needed."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError  # loaded with `strict` anyway

    annotations = {field.name: field.type for field in dataclasses.fields(cls)}
    set_strictly: Any = cls.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        try:
            set_strictly(self, name, value)
        except StrictDataclassFieldValidationError:
            raise UserError(wrong_type(name, value, annotations[name])) from None

    cls.__setattr__ = set_attribute  # type: ignore[assignment]
    return cls


def type_in_words(annotation: Any, plural: bool = False) -> str:
    """`a list of whole numbers` for `list[int]`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"{', '.join(parts[:-1])} or {parts[-1]}"
    if origin in (Union, types.UnionType):
        kinds = [part for part in parts if not (part is int and float in parts)]
        return " or ".join(type_in_words(part, plural) for part in kinds)
    if origin is dict and parts[1] is not Any:
        return f"a section of {type_in_words(parts[1], plural=True)}"
    if origin in (list, tuple):
        number = f"{len(parts)} " if origin is tuple and ... not in parts else ""
        return ("lists of " if plural else "a list of ") + number + type_in_words(parts[0], plural=True)
    words = {bool: "true or false", type(None): "null", Any: "any value"}
    words |= (
        {int: "whole numbers", float: "numbers", str: "words", dict: "sections"}
        if plural
        else {int: "a whole number", float: "a number", str: "a word", dict: "a section of settings"}
    )
    return words.get(origin or annotation, "another kind of value")


def one_line(message: str) -> str:
    """A message on one line; one that is longer than any of ours loses its middle."""
    return cut(message, LONGEST_MESSAGE)
