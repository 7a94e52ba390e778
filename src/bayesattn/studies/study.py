"""What a study is, and the registry of all studies: the folders in `studies` that have a run.py with a `STUDY`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bayesattn import studies
from bayesattn.errors import UserError
from bayesattn.evaluation.cells import Cell
from bayesattn.files import short_name
from bayesattn.schemas import Row
from bayesattn.studies.options import Json, RunOut, parse_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Characters of a setting in the name of a folder. Two that begin alike share one, which refuses the second result.
LONGEST_PART = 40


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a study. Each field is an option of its command, and the docstring is its help.

    `file` names the result file, and `title` begins the name of the folder if it is another. Settings in `named` are
    part of that name, a model always and others where they are not the default: so different measurements have
    different folders. `pictures` are the names of the pictures.
    """

    file: ClassVar[str]
    title: ClassVar[str] = ""
    pictures: ClassVar[tuple[str, ...]] = ()
    named: ClassVar[tuple[str, ...]] = ()

    json: Json = None
    out: RunOut = None

    @property
    def folder(self) -> Path:
        """Where results and pictures go."""
        if self.out is not None:
            return self.out
        defaults = {field.name: field.default for field in fields(self)}
        parts = [self.title or self.file]
        for name in self.named:
            value = getattr(self, name)
            if name in ("model", "models"):
                parts.append(short_name(value if isinstance(value, str) else value[0]))
            elif value != defaults[name]:
                parts += [name.replace("_", "-"), Path(str(value)).name[:LONGEST_PART]]
        return Path("runs") / "-".join(parts).replace(":", "-")  # of `+clip:64`; some file systems have no colons

    @property
    def results(self) -> Path:
        """The result file."""
        return self.json or self.folder / f"{self.file}.json"

    @property
    def budget_seconds(self) -> float | None:
        """The budget, for a study that has one."""
        budget = getattr(self, "budget", None)
        return None if budget is None else parse_seconds(budget)


@dataclass(frozen=True, kw_only=True)
class Result(Row):
    """What the result file of a study holds: `command` made it, and it is `partial` until it is all there."""

    command: str | None = None
    partial: bool | None = None


S = TypeVar("S", bound=Settings)
R = TypeVar("R", bound=Result)


class Progress(Generic[R]):
    """What a run tells while it measures, and what it may ask. This one remembers, saves and shows nothing."""

    def __init__(self, budget: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self._clock, self._begin = budget, clock, clock()

    def left(self) -> float:
        """Seconds that are left of the budget."""
        return float("inf") if self.budget is None else self.budget - (self._clock() - self._begin)

    def step(self, what: str, done: int = 0, total: int | None = None) -> None:
        """So much of it is done."""

    def keep(self, result: R) -> None:
        """Save the result so far."""

    def keep_draws(self, draws: NDArray[Any]) -> None:
        """Save raw numbers from which a run of the same settings goes on."""

    def is_due(self) -> bool:
        """Whether it is time to keep what there is, where that takes time itself."""
        return False

    def earlier(self, known: Mapping[str, Any] | None = None) -> R | None:
        """The result that the file has already.

        Raises:
            UserError: its content differs from what is `known`.
        """
        return None

    def draws(self, settings: Mapping[str, Any]) -> NDArray[Any] | None:
        """The raw numbers of a run of these settings that was stopped."""
        return None


@dataclass(frozen=True)
class Study(Generic[S, R]):
    """A measurement. Its folder has run.py, which defines it, and show.py.

    show.py has `tables(result)`: tables and sentences for the terminal. It may have `figures(result, folder)`, which
    draws and returns files, and `sections(results)`, for the page. Without that the page shows the tables, and
    `chart(result)` if there is one.

    Args:
        kind: of its result files.
        commands: settings by the command that has them as options, such as `eval passkey`.
        run: measures.
        result: the type of the result, whose fields are the schema of the result file.
        place: in lists of commands and on the page, studies with smaller numbers come first.
        trials: cells by task and length, if results of models can be compared; only results of the same `settings` are.
    """

    kind: str
    commands: Mapping[str, type[S]]
    run: Callable[[S, Progress[R]], R]
    result: type[R]
    place: int = 100
    trials: Callable[[R], dict[tuple[str, int], Cell]] | None = None

    @property
    def show(self) -> Any:
        """Its show.py, which is imported when something is to be shown."""
        return import_module(f"{self.run.__module__.rpartition('.')[0]}.show")


def all_studies() -> list[Study[Any, Any]]:
    """The registry: every folder of `studies` that has a run.py."""
    found: list[Study[Any, Any]] = []
    for folder in map(Path, studies.__path__):
        for file in folder.rglob("run.py"):
            package = ".".join([studies.__name__, *file.parent.relative_to(folder).parts])
            found.append(import_module(f"{package}.run").STUDY)
    return sorted(found, key=lambda study: (study.place, study.kind))


def find_study(kind: str) -> Study[Any, Any] | None:
    """The study of result files of this kind."""
    return next((study for study in all_studies() if study.kind == kind), None)


def check_same(name: str, before: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise an error if a result of this name does not have the known content."""
    flat, now = ({**part, **part.get("settings", {})} for part in (before, known))
    if differing := sorted(key for key in now if key != "settings" and flat.get(key) != now[key]):
        raise UserError(f"{name} holds another evaluation, with other {', '.join(differing)}; choose another file")
