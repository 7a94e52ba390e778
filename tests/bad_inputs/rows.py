"""Bad input, one row each: what is given, and what must be said.

The rule: one sentence of at most 300 characters with what was given and what is allowed. A command ends with exit code
2 and touches no file. A new row is one line in the list of its test module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bayesattn.cli import main

LONGEST = 300


class Row(NamedTuple):
    name: str  # the parameter, option, field or setting
    given: object  # its value
    says: str  # part of the sentence

    def __str__(self) -> str:
        """The name of the row's test, which is the same in every process."""
        plain = isinstance(self.given, (str, int, float, list, tuple, dict, type(None)))
        given = str(self.given)[:40] if plain and " at 0x" not in str(self.given) else type(self.given).__name__
        return f"{self.name}={given}"


def rows(names: str, *cases: tuple[object, str]) -> list[Row]:
    """The same cases, each (what is given, part of the sentence), for every one of the names."""
    return [Row(name, given, says) for name in names.split() for given, says in cases]


def check_sentence(text: str, says: str) -> None:
    """One line of at most 300 characters that contains `says`."""
    assert says in text
    assert len(text) <= LONGEST, f"{len(text)} characters"
    assert len(text.splitlines()) == 1


def check_refused(call: Callable[[], object], says: str) -> None:
    """The call raises a TypeError or ValueError (a UserError is one) with such a sentence."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    check_sentence(str(caught.value), says)


def check_command_refused(
    arguments: list[str],
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command, run in `folder`, ends with exit code 2 and such a sentence, and touches no file."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["bayesattn", *arguments])
    before = _contents(folder)
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err.rstrip("\n")
    assert ended.value.code == 2, errors
    assert errors.startswith("bayesattn: ")
    check_sentence(errors.removeprefix("bayesattn: "), says)
    assert _contents(folder) == before


def _contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
