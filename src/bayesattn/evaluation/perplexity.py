"""Perplexity with more and more context: of the same tokens, or by position in one long text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from bayesattn.data.contexts import Tokens
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.files import content_of, read_results, write_results

KIND = "perplexity"
# Of a normal distribution, for 95% intervals of means over windows.
Z = 1.96
# Tokens that go through a model at a time when a whole text is read.
CHUNK = 2048

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Perplexity of windows of a text.

    `context` is how many tokens stand before each window. `change` is the loss less that of the first row, on the same
    windows, so that its interval is narrower than those of the two.
    """

    context: int
    windows: int
    perplexity: float
    low: float
    high: float
    change: float
    change_low: float
    change_high: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_context(
    reader: Reader, stream: Tokens, contexts: Sequence[int], *, window: int | None = None, windows: int = 64
) -> Iterator[Row]:
    """The same windows, each read after more and more of the text before it; shortest context first.

    Args:
        stream: the text as tokens.
        contexts: tokens before each window.
        window: tokens of each window, by default the training length less the shortest context, and at least 32.
        windows: spread evenly over what has the longest context before it.
    """
    contexts = sorted(set(contexts))
    window = window or max(32, reader.train_length - contexts[0])
    starts = window_starts(len(stream), contexts[-1], window, windows)
    _check_length(reader, contexts[-1] + window)
    first: Losses | None = None
    for context in contexts:
        begin = time.perf_counter()
        losses = np.array([_window_loss(reader, stream, start, context, window) for start in starts])
        first = losses if first is None else first
        yield _row(context, losses, first, time.perf_counter() - begin)


def _check_length(reader: Reader, length: int) -> None:
    most = reader.most_positions
    if most is not None and length > most:
        raise UserError(f"{reader.name} has positions for {most:,} tokens; {length:,} are asked for")
    reader.check_length(length)


def window_starts(tokens: int, first: int, window: int, windows: int) -> list[int]:
    """Where windows begin that are spread over a text from token `first` on; as many as do not overlap."""
    windows = min(windows, (tokens - first) // max(1, window))
    if window < 2 or windows < 2:
        raise UserError(
            f"the text has {tokens:,} tokens; two windows of {window:,} with {first:,} before them do not fit in it"
        )
    return np.linspace(first, tokens - window, windows).astype(int).tolist()


def _window_loss(reader: Reader, stream: Tokens, start: int, context: int, window: int) -> float:
    """Mean loss of the tokens of a window after its first, which are the same whatever stands before."""
    ids = torch.from_numpy(stream[start - context : start + window].astype(np.int64))[None].to(reader.model.device)
    with torch.inference_mode():
        logits = reader.model(input_ids=ids, logits_to_keep=window).logits[0, -window:-1].float()
    return cross_entropy(logits, ids[0, 1 - window :]).item()


def _row(context: int, losses: Losses, first: Losses, seconds: float) -> Row:
    mean, error = _mean(losses)
    change, change_error = _mean(losses - first)
    return Row(
        context=context,
        windows=len(losses),
        perplexity=math.exp(mean),
        low=math.exp(mean - error),
        high=math.exp(mean + error),
        change=change,
        change_low=change - change_error,
        change_high=change + change_error,
        seconds=seconds,
    )


def _mean(values: Losses) -> tuple[float, float]:
    """And half of its 95% interval."""
    return float(values.mean()), float(Z * values.std(ddof=1) / math.sqrt(len(values)))


def effective_context(rows: Sequence[Row]) -> int:
    """The least context after which none lowers the loss by more than chance tells: what the model makes use of."""
    best = rows[0]
    for row in rows[1:]:
        # Both changes are against the same first row; their widths bound that of the difference.
        if row.change_high < best.change_low or (best is rows[0] and row.change_high < 0):
            best = row
    return best.context


def by_position(reader: Reader, texts: Sequence[Tokens], length: int, *, parts: int = 16) -> list[Row]:
    """Perplexity by position: `length` tokens of each text read once, in parts of equal length.

    A row's context is the position where its part begins; intervals are over texts, or over stretches of 32 tokens of
    the part if there is one text alone.
    """
    if length < 2 * parts:
        raise UserError(f"{length:,} tokens are asked for; {parts} parts need at least {2 * parts}")
    long_enough = [text[:length] for text in texts if len(text) >= length]
    if not long_enough:
        longest = max((len(text) for text in texts), default=0)
        raise UserError(f"no text has {length:,} tokens; the longest has {longest:,}")
    _check_length(reader, length)
    begin = time.perf_counter()
    losses = np.stack([_token_losses(reader, text) for text in long_enough])
    seconds = time.perf_counter() - begin
    edges = np.linspace(0, length, parts + 1).astype(int)
    rows, first = [], None
    for start, stop in pairwise(edges):
        part = losses[:, max(0, start - 1) : stop - 1]  # the loss of a token is where the one before it stands
        if len(part) > 1:
            samples = part.mean(1)
        else:
            pieces = max(2, part.shape[1] // 32)
            samples = np.array([piece.mean() for piece in np.array_split(part[0], pieces)])
        first = samples if first is None else first
        pairs = min(len(samples), len(first))
        rows.append(_row(int(start), samples[:pairs], first[:pairs], seconds / parts))
    return rows


def _token_losses(reader: Reader, text: Tokens) -> Losses:
    """Of every token but the first, in one reading with a cache."""
    ids = torch.from_numpy(text.astype(np.int64))[None].to(reader.model.device)
    past, losses = None, []
    with torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, CHUNK):
            part = ids[:, start : min(start + CHUNK, ids.shape[1] - 1)]
            out = reader.model(input_ids=part, past_key_values=past, use_cache=True)
            past = out.past_key_values
            targets = ids[0, start + 1 : start + 1 + part.shape[1]]
            losses.append(cross_entropy(out.logits[0].float(), targets, reduction="none").double().cpu().numpy())
    return np.concatenate(losses)


def run(
    readers: Iterable[Reader],
    source: str,
    lengths: Callable[[Reader], Sequence[int]],
    file: Path,
    *,
    by: str = "context",
    windows: int = 64,
    command: str = "",
) -> Iterator[dict[str, list[Row]]]:
    """Rows by model, kept in a file as they grow; by position, the longest of the lengths is read.

    A model whose rows the file has all of, measured in the same way, is not measured again.
    """
    settings: dict[str, Any] = {"by": by, "text": source, "windows": windows, **content_of(source)}
    kept = _measured(file, settings)
    results: dict[str, list[Row]] = {}
    for reader in readers:
        stream, contexts = reader.stream(source), lengths(reader)
        rows = results[reader.name] = []
        told: dict[str, Any] = {"model": reader.name, "train_length": reader.train_length}
        told["fingerprint"] = reader.fingerprint
        told |= {"contexts": list(contexts), "finished": False}
        done = kept.pop(reader.name, {})
        if {**told, "finished": True}.items() <= done.items():
            kept[reader.name] = done
            rows += [Row(**row) for row in done["rows"]]
            yield results
            continue
        for row in (
            by_context(reader, stream, contexts, windows=windows)
            if by == "context"
            else by_position(reader, [stream], max(contexts), parts=windows)
        ):
            rows.append(row)
            told |= {"effective_context": effective_context(rows), "rows": [row.to_dict() for row in rows]}
            kept[reader.name] = told
            write_results(file, KIND, {**settings, "command": command, "models": list(kept.values())})
            yield results
        told["finished"] = True
        write_results(file, KIND, {**settings, "command": command, "models": list(kept.values())})


def _measured(file: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Models of a file of results with the same settings, by name; another file is written anew."""
    if not file.exists():
        return {}
    content = read_results(file, KIND)
    same = all(content.get(key) == value for key, value in settings.items())
    return {model["model"]: model for model in content["models"]} if same else {}
