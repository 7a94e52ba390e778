"""Trials and perplexities of all methods, the short lengths of all before the long ones of any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import evaluate
from bayesattn.studies.bench.measure import peak_bytes
from bayesattn.studies.extend.methods import Sizes, load_method
from bayesattn.studies.extend.run import METHODS, Extend, Method, Peak, Settings
from bayesattn.studies.perplexity.measure import UNFINISHED, effective_context, measure_by_position
from bayesattn.studies.perplexity.run import ModelLosses
from bayesattn.studies.study import Progress

# Each method has so many trials of a length before any has more.
ROUNDS = (1, 5, 10)


class Comparison:
    """What is known of each method so far."""

    def __init__(
        self,
        progress: Progress[Extend],
        settings: Settings,
        sizes: Sizes,
        task: Any,
        names: Sequence[str],
        earlier: Sequence[Method],
    ) -> None:
        self.progress, self.settings, self.sizes, self.task, self.names = progress, settings, sizes, task, names
        known = {each.method: each for each in earlier}
        self.known = {
            name: known.get(name, Method(name, METHODS[name], [], [])) for name in METHODS if name in {*names, *known}
        }
        for name, method in self.known.items():  # what there was no time for has another chance
            cells = [replace(cell, note="") for cell in method.cells if cell.trials]
            self.known[name] = replace(method, cells=cells)

    def methods(self) -> list[Method]:
        """The results so far."""
        return list(self.known.values())

    def measure(self, lengths: Sequence[int]) -> Iterator[list[Method]]:
        """Pass keys of these lengths, and perplexities in a text of the longest; yields the results so far."""
        yield from self.pass_keys(lengths)
        if self.settings.perplexity:
            yield from self.perplexities(lengths[-1])

    def pass_keys(self, lengths: Sequence[int]) -> Iterator[list[Method]]:
        """Trials from the shortest length to the longest; yields the results so far after every batch."""
        trials = self.settings.trials
        for length in lengths:
            for target in sorted({min(trials, number) for number in (*ROUNDS, trials)}):
                for name in self.names:
                    cell = self._cell(name, length)
                    if cell.trials >= target:
                        continue
                    if (seconds := self._seconds(name, length)) > self.progress.left():
                        note = "" if cell.trials else f"not tried: a trial would take about {seconds:.0f} s"
                        self._keep(name, replace(cell, note=note, planned=trials))
                        yield self.methods()
                        continue
                    self.progress.step(f"loading {name}")
                    reader = self._load(name)
                    yield from self._ask(reader, replace(cell, planned=target, note=""))

    def _ask(self, reader: Reader, cell: Cell) -> Iterator[list[Method]]:
        """Trials up to those planned, as long as there is time."""
        length, planned = cell.length, cell.planned
        batches = evaluate(
            reader,
            self.task,
            [length],
            planned,
            seed=self.settings.seed,
            done=[cell] if cell.trials else (),
            stop=False,
        )
        if cell.trials:
            next(batches)  # what is known

        def ask() -> None:
            nonlocal cell
            cell = next(batches)

        while cell.trials < planned and self._seconds(reader.name, length) <= self.progress.left():
            peak = Peak(length, peak_bytes(ask))
            self._keep(reader.name, replace(cell, planned=self.settings.trials), peak)
            self.progress.step(f"{reader.name}, {length:,} tokens", cell.trials, self.settings.trials)
            yield self.methods()

    def perplexities(self, length: int) -> Iterator[list[Method]]:
        """Perplexity by position in one text, or several, of this length; yields the results so far."""
        for name in self.names:
            before = self.known[name].perplexity
            if before is not None and before.length == length and not (before.texts or "").startswith(UNFINISHED):
                continue
            if self.progress.left() <= 0:
                return
            self.progress.step(f"loading {name}")
            reader = self._load(name)
            steps = measure_by_position(
                self.progress, reader, self.settings.text, [length], self.settings.parts, before
            )  # fmt: skip
            for details, rows in steps:
                losses = ModelLosses(name, reader.train_length, effective_context(rows), rows, **details)
                self.known[name] = replace(self.known[name], perplexity=losses)
                yield self.methods()

    def _load(self, name: str) -> Reader:
        return load_method(
            name, self.settings.model, self.settings.tokenizer, self.sizes, self.known[name].near
        )  # fmt: skip

    def _cell(self, name: str, length: int) -> Cell:
        return next((cell for cell in self.known[name].cells if cell.length == length), Cell(length))

    def _keep(self, name: str, cell: Cell, peak: Peak | None = None) -> None:
        method = self.known[name]
        cells = {each.length: each for each in method.cells} | {cell.length: cell}
        peaks = {each.length: each for each in method.peaks}
        if peak is not None and peak.bytes > getattr(peaks.get(peak.length), "bytes", -1):
            peaks[peak.length] = peak
        self.known[name] = replace(
            method, cells=[cells[at] for at in sorted(cells)], peaks=[peaks[at] for at in sorted(peaks)]
        )

    def _seconds(self, name: str, length: int) -> float:
        """How long a trial takes, by those of this method at this length, of others, or at most by shorter ones."""
        own = self._cell(name, length)
        if own.trials:
            return own.seconds / own.trials
        others = [cell for cell in (self._cell(other, length) for other in self.known) if cell.trials]
        if others:
            return max(cell.seconds / cell.trials for cell in others)
        shorter = [cell for cell in self.known[name].cells if cell.trials and cell.length < length]
        return shorter[-1].seconds / shorter[-1].trials * (length / shorter[-1].length) ** 2 if shorter else 0.0
