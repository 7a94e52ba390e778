"""What the fields of result files may hold: checks, types that carry them, and rows made of such types.

A check takes a value and returns None, or what is wrong with it. A row is a dataclass whose fields have such types: it
gives the check of its JSON, is written as JSON, and is read from it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bayesattn.errors import is_number, is_whole, shown

# What is wrong: the place within the value, such as `[3].trials`, and the rest of the sentence.
Wrong = tuple[str, str]
Check = Callable[[Any], "Wrong | None"]
Fields = Mapping[str, Check]
R = TypeVar("R")

# More tokens, trials, layers or bytes than any model has; beyond that somebody confused two numbers.
MOST = 2**60
# Rounding of the numbers in a file.
ROUNDING = 1e-4


def text(value: Any) -> Wrong | None:
    return None if isinstance(value, str) and "\0" not in value else ("", f"is {shown(value)}; a text is needed")


def yes_or_no(value: Any) -> Wrong | None:
    return None if isinstance(value, bool) else ("", f"is {shown(value)}; true or false is needed")


def whole(least: int = 0, most: int = MOST) -> Check:
    def check(value: Any) -> Wrong | None:
        if is_whole(value, least, most):
            return None
        return "", f"is {shown(value)}; a whole number of at least {least} is needed"

    return check


def number(least: float = -1e300, most: float = 1e300) -> Check:
    needed = "a number" + (f" of at least {least:g}" if least > -1e300 else "")
    needed += f"{' and' if least > -1e300 else ' of'} at most {most:g}" if most < 1e300 else ""

    def check(value: Any) -> Wrong | None:
        return None if is_number(value) and least <= value <= most else ("", f"is {shown(value)}; {needed} is needed")

    return check


def share(value: Any) -> Wrong | None:
    """From 0 to 1, with room for rounding."""
    if is_number(value) and -ROUNDING <= value <= 1 + ROUNDING:
        return None
    return "", f"is {shown(value)}; a number from 0 to 1 is needed"


def or_null(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def one_of(*allowed: str) -> Check:
    def check(value: Any) -> Wrong | None:
        known = isinstance(value, str) and value in allowed
        return None if known else ("", f"is {shown(value)}; {' or '.join(allowed)} is needed")

    return check


def several(check: Check, least: int = 0, exactly: int | None = None) -> Check:
    """A list of such values."""
    needed = f"a list of {exactly}" if exactly is not None else f"a list of at least {least}" if least else "a list"

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, list) or len(value) < least or (exactly is not None and len(value) != exactly):
            return "", f"is {shown(value)}; {needed} is needed"
        for place, entry in enumerate(value):
            if wrong := check(entry):
                return f"[{place}]{wrong[0]}", wrong[1]
        return None

    return check_all


def at_least(number: int) -> Check:
    """For a list that has as many entries."""
    return several(lambda _: None, least=number)


def table_of(check: Check) -> Check:
    """Such values by name."""

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, dict):
            return "", f"is {shown(value)}; names with values are needed"
        for name, entry in value.items():
            if wrong := check(entry):
                return f".{shown(name)}{wrong[0]}", wrong[1]
        return None

    return check_all


def record(fields: Fields, also: Check | None = None) -> Check:
    """A dict with these fields, and maybe others; `also` checks how they fit together."""

    def check_all(value: Any) -> Wrong | None:
        if not isinstance(value, dict):
            return "", f"is {shown(value)}; names with values are needed"
        for key, check in fields.items():
            name = key.removesuffix("?")
            if name not in value:
                if name == key:
                    return "", f"has no {name}"
                continue
            if wrong := check(value[name]):
                return f".{name}{wrong[0]}", wrong[1]
        return also(value) if also else None

    return check_all


Whole = Annotated[int, whole()]
Tokens = Annotated[int, whole(1)]
Number = Annotated[float, number()]
Amount = Annotated[float, number(0)]
Positive = Annotated[float, number(1e-300)]
Share = Annotated[float, share]
# What no reader looks into.
Anything = Annotated[Any, lambda _: None]


def digits(number: int) -> dict[str, int]:
    """Metadata of a field whose numbers are rounded in JSON."""
    return {"digits": number}


class Row:
    """Base of dataclasses that are written as JSON: their fields, and the properties named in `derived`.

    A field that is None by default is written only if it is not, and may be absent. A static method `fits` may check
    how the fields of a JSON fit together.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        content: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                content[field.name] = _plain(value, field.metadata.get("digits"))
        return content | {name: _plain(getattr(self, name)) for name in self.derived}

    @classmethod
    def from_dict(cls: type[R], content: Mapping[str, Any]) -> R:
        """The row that `to_dict` wrote; `check_of` has found nothing wrong with it."""
        hints = get_type_hints(cls, include_extras=True)
        names = [field.name for field in dataclasses.fields(cls) if field.name in content]  # type: ignore[arg-type]
        return cls(**{name: _read(hints[name], content[name]) for name in names})


def _plain(value: Any, places: int | None = None) -> Any:
    if isinstance(value, Row):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(part, places) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, places) for part in value]
    return round(value, places) if places is not None and isinstance(value, (int, float)) else value


def _read(kind: Any, value: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read(parts[0], value)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(_not_null(kind), value)
    if origin in (list, tuple):
        return origin(_read(parts[0], part) for part in value)
    if origin is dict:
        return {key: _read(parts[1], part) for key, part in value.items()}
    return kind.from_dict(value) if isinstance(kind, type) and issubclass(kind, Row) else value


def _not_null(kind: Any) -> Any:
    """X of the type `X | None`."""
    return next((part for part in get_args(kind) if part is not type(None)), kind)


def check_of(kind: Any) -> Check:
    """The check of a type: of a row, of a list, tuple or dict of such types, of one of them or null, or of a word."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base = [] if parts[0] in (int, float, Any) else [check_of(parts[0])]  # these have their whole check beside them
        return _all([*base, *parts[1:]])
    if origin is Literal:
        return one_of(*parts)
    if origin in (Union, types.UnionType):
        return or_null(check_of(_not_null(kind)))
    if origin is list:
        return several(check_of(parts[0]))
    if origin is tuple:
        return several(check_of(parts[0]), exactly=None if ... in parts else len(parts))
    if origin is dict:
        return table_of(check_of(parts[1]))
    if issubclass(kind, Row):
        return _check_of_row(kind)
    return {str: text, bool: yes_or_no, int: whole(), float: number()}[kind]


@cache
def _check_of_row(row: type[Row]) -> Check:
    hints = get_type_hints(row, include_extras=True)
    checks = {}
    for field in dataclasses.fields(row):  # type: ignore[arg-type]
        kind = hints[field.name]
        if field.default is None:
            checks[f"{field.name}?"] = check_of(_not_null(kind))
        else:
            checks[field.name] = check_of(kind)
    for name in row.derived:
        checks[name] = check_of(get_type_hints(getattr(row, name).fget, include_extras=True)["return"])
    return record(checks, getattr(row, "fits", None))


def _all(checks: list[Check]) -> Check:
    return lambda value: next((wrong for check in checks if (wrong := check(value))), None)
