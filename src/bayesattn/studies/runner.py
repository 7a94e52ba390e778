"""Runs a study for the command line: shows progress, saves results as they come, and prints what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress as Bars
from rich.progress import TimeElapsedColumn

from bayesattn.files import check_writable, joined_commands, write_whole
from bayesattn.interrupts import keeps
from bayesattn.studies.results import ELSEWHERE, earlier_results, write_results
from bayesattn.studies.study import Progress, R, S, Study, check_same

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Without a terminal, a line of progress after so many seconds, and then after so many again.
FIRST_LINE, NEXT_LINE = 2.0, 5.0
# Results that take time to make are saved after so many seconds, and for at most one in ten of all.
SAVE_AFTER, SAVING_SHARE = 5.0, 0.1


class Saved(Progress[R]):
    """Progress that is saved in a file: results as JSON, and raw numbers beside it until all is measured."""

    def __init__(self, study: Study[Any, R], file: Path, command: str = "", budget: float | None = None) -> None:
        super().__init__(budget)
        self.study, self.file, self.command = study, file, command
        self.raw = file.parent / f"{file.name}.draws"
        self.settings: Mapping[str, Any] = {}
        self.pointer: Path | None = None
        self.has_results = False
        self._kept, self._cost = self._clock(), 0.0

    def earlier(self, known: Mapping[str, Any] | None = None) -> R | None:
        content = earlier_results(self.file, self.study.kind)
        if content is None:
            return None
        check_same(str(self.file), content, known or {})
        self.has_results = True
        self.command = joined_commands(content.get("command", ""), self.command)
        return self.study.result.from_dict(content)

    def draws(self, settings: Mapping[str, Any]) -> NDArray[Any] | None:
        import numpy as np

        self.settings = settings
        try:
            with np.load(self.raw, allow_pickle=False) as content:
                same = str(content["settings"]) == json.dumps(settings, sort_keys=True)
                return content["draws"] if same else None
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def is_due(self) -> bool:
        return self._clock() - self._kept > max(SAVE_AFTER, self._cost / SAVING_SHARE)

    def keep(self, result: R) -> None:
        begin = self._clock()
        self._write(result, partial=True)
        self._kept = self._clock()
        self._cost = self._kept - begin

    def keep_draws(self, draws: NDArray[Any]) -> None:
        import numpy as np

        raw = BytesIO()
        np.savez(raw, draws=draws, settings=np.array(json.dumps(self.settings, sort_keys=True)))
        write_whole(self.raw, raw.getvalue())
        self._kept = self._clock()

    def finish(self, result: R) -> None:
        """Save the whole result. Raw numbers stay only if a run was cut short by its budget."""
        self._write(result)
        if self.left() > 0:
            self.raw.unlink(missing_ok=True)

    def _write(self, result: R, **partial: bool) -> None:
        command = {"command": self.command} if self.command else {}
        self.has_results = True
        write_results(self.file, self.study.kind, {**result.to_dict(), **command, **partial})
        if self.pointer is not None:
            write_whole(self.pointer, f"{self.file.resolve()}\n")


class Shown(Saved[R]):
    """Progress that is shown too: the table so far and a bar in a terminal, now and then a line elsewhere."""

    def __init__(self, *arguments: Any, console: Console, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.console, self.bars = console, Bars(*Bars.get_default_columns(), TimeElapsedColumn(), console=console)
        self.task = self.bars.add_task("loading", total=None)
        self.live = Live(self.bars, console=console, refresh_per_second=4, transient=True)
        self._table: Any = None
        self._next_line = FIRST_LINE

    def step(self, what: str, done: int = 0, total: int | None = None) -> None:
        if self.console.is_terminal:
            self.bars.update(self.task, description=what, completed=done, total=total)
        elif (passed := self._clock() - self._begin) > self._next_line:
            self.console.print(what if total is None else f"{what}: {done:,} of {total:,}", highlight=False)
            self._next_line = passed + NEXT_LINE

    def keep(self, result: R) -> None:
        super().keep(result)
        if self.console.is_terminal:
            self.live.update(Group(self.study.show.tables(result)[0], self.bars))

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self.live:
            yield


def run_study(study: Study[S, R], settings: S, console: Console, command: str = "") -> None:
    """Measure, save, draw and print. What is there already is not measured again where the study can go on."""
    file, folder, pointer = settings.results, settings.folder, settings.folder / f"{settings.file}{ELSEWHERE}"
    progress: Shown[R] = Shown(study, file, command, settings.budget_seconds, console=console)
    if folder.resolve() not in file.resolve().parents:
        progress.pointer = pointer
    check_writable(*(folder / f"{name}.png" for name in settings.pictures), pointer, results=file)

    def kept() -> str:
        if not progress.raw.exists() and not (progress.has_results and file.exists()):
            return "there are no results yet, and the same command starts again"
        return f"the results so far are in {file}, and the same command resumes"

    with keeps(kept), progress.running():
        result = study.run(settings, progress)
        progress.finish(result)
    console.print(*study.show.tables(result), sep="\n", highlight=False)
    draw = getattr(study.show, "figures", None)
    pictures = [] if draw is None else draw(result, folder)
    console.print(*(path for path in pictures if path.suffix == ".png"), file, sep="\n")
