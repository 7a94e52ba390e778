"""Perplexity with more and more context: of the same tokens, or by position in long texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import BUNDLED, documents
from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import half_interval
from bayesattn.evaluation.reader import Reader
from bayesattn.files import content_of, joined_commands, read_results, write_results

KIND = "perplexity"
# Tokens that go through a model at a time when a whole text is read.
CHUNK = 2048
# Tokens of a stretch, about: what a part of one text alone is divided into to tell its interval.
STRETCH = 32
# Tokens of a part, so that two losses are in the first one too: its first token has nothing before it.
LEAST_PART = 3

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Perplexity of windows of a text, or of a part of one or several, with 95% intervals.

    `context` is how many tokens stand before. `change` is the loss less that of the first row; by context that is on
    the same windows, so that its interval is narrower than those of the two. `losses` are those of each window, text or
    stretch, which the intervals are made of.
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
    losses: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "losses": list(self.losses)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Row:
        return cls(**{**row, "losses": tuple(row["losses"])})


class _Sampled(NamedTuple):
    """A mean loss, and those of the samples that tell how far it may be off."""

    mean: float
    samples: Losses


def by_context(
    reader: Reader,
    stream: Tokens,
    contexts: Sequence[int],
    *,
    window: int | None = None,
    windows: int = 64,
    starts: Sequence[int] | None = None,
    done: Sequence[Row] = (),
) -> Iterator[list[Row]]:
    """The same windows, each read after more and more of the text before it: the rows so far, after each context.

    Args:
        stream: the text as tokens.
        contexts: tokens before each window.
        window: tokens of each window, by default the training length less the shortest context, and at least 32.
        windows: spread evenly over what has the longest context before it.
        starts: where windows begin, if it is known already.
        done: rows of the same windows, which are not measured again.
    """
    contexts = sorted(set(contexts))
    window = window or default_window(reader, contexts)
    starts = starts or window_starts(len(stream), contexts[-1], window, windows)
    _check_length(reader, contexts[-1] + window)
    measured = {row.context: (np.array(row.losses), row.seconds) for row in done}
    if measured:
        yield _rows(measured)
    for context in contexts:
        if context not in measured:
            begin = time.perf_counter()
            losses = np.array([_window_loss(reader, stream, start, context, window) for start in starts])
            measured[context] = losses, time.perf_counter() - begin
            yield _rows(measured)


def default_window(reader: Reader, contexts: Sequence[int]) -> int:
    """Tokens that fill the training length after the shortest context, and at least 32."""
    return max(32, reader.train_length - min(contexts))


def _rows(measured: Mapping[int, tuple[Losses, float]]) -> list[Row]:
    """Shortest context first; the first is what changes are against, also if it came last."""
    found = {context: _Sampled(float(losses.mean()), losses) for context, (losses, _) in measured.items()}
    first = found[min(found)]
    return [_row(context, found[context], first, measured[context][1]) for context in sorted(found)]


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
    logits = reader.last_logits(ids, window)[0, :-1].float()
    return cross_entropy(logits, ids[0, 1 - window :]).item()


def _row(context: int, found: _Sampled, first: _Sampled, seconds: float) -> Row:
    error, change = half_interval(found.samples), found.mean - first.mean
    change_error = half_interval(found.samples - first.samples)
    return Row(
        context=context,
        windows=len(found.samples),
        perplexity=math.exp(found.mean),
        low=math.exp(found.mean - error),
        high=math.exp(found.mean + error),
        change=change,
        change_low=change - change_error,
        change_high=change + change_error,
        seconds=seconds,
        losses=tuple(found.samples.tolist()),
    )


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

    A row's context is the position where its part begins, and its perplexity that of every token of the part but the
    first of a text. Intervals are over texts, or over stretches of about 32 tokens of the part if there is one text
    alone. A change is between parts, which have different tokens.
    """
    if length < LEAST_PART * parts:
        raise UserError(f"{length:,} tokens are asked for; {parts} parts need at least {LEAST_PART * parts}")
    long_enough = [text[:length] for text in texts if len(text) >= length]
    if not long_enough:
        longest = max((len(text) for text in texts), default=0)
        raise UserError(f"no text has {length:,} tokens; the longest has {longest:,}")
    _check_length(reader, length)
    begin = time.perf_counter()
    losses = np.stack([_token_losses(reader, text) for text in long_enough])
    seconds = time.perf_counter() - begin
    edges = np.linspace(0, length, parts + 1).astype(int).tolist()
    # The loss of a token is where the one before it stands.
    divided = [losses[:, max(0, start - 1) : stop - 1] for start, stop in pairwise(edges)]
    # As many in every part, although the first is one token shorter: changes are between pairs of them.
    stretches = max(2, round(min(part.shape[1] for part in divided) / STRETCH))
    found = [_sampled(part, stretches) for part in divided]
    return [_row(start, one, found[0], seconds / parts) for start, one in zip(edges, found, strict=False)]


def _sampled(part: Losses, stretches: int) -> _Sampled:
    """The losses [texts, tokens] of a part."""
    samples = [text.mean() for text in (part if len(part) > 1 else np.array_split(part[0], stretches))]
    return _Sampled(float(part.mean()), np.array(samples))


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

    Rows that the file has of a model are not measured again. Other contexts may be asked for later: they are measured
    on the same windows as the rows in the file if these have so much text before them. If not, or by position with
    another length, the rows cannot be compared, and the model is measured anew. Another text, or another number of
    windows, is refused.
    """
    content = {} if source == BUNDLED else content_of(source)
    settings: dict[str, Any] = {"by": by, "text": source, "windows": windows, **content}
    kept, command = _kept(file, settings, command)
    results: dict[str, list[Row]] = {}
    measure = _measure_by_context if by == "context" else _measure_by_position
    for reader in readers:
        known = {"model": reader.name, "train_length": reader.train_length, "fingerprint": reader.fingerprint}
        before = kept.get(reader.name, {})
        before = before if known.items() <= before.items() else {}
        for told, rows in measure(reader, source, sorted(set(lengths(reader))), windows, before):
            told |= {"effective_context": effective_context(rows), "rows": [row.to_dict() for row in rows]}
            kept[reader.name] = {**known, **told}
            write_results(file, KIND, {**settings, "command": command, "models": list(kept.values())})
            results[reader.name] = rows
            yield results


def _kept(file: Path, settings: Mapping[str, Any], command: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Models of a file of results, by name, and the commands that make it."""
    if not file.exists():
        return {}, command
    content = read_results(file, KIND)
    if differing := sorted(key for key, value in settings.items() if content.get(key) != value):
        raise UserError(f"{file} holds another evaluation, with other {', '.join(differing)}; choose another file")
    told = joined_commands(content.get("command", ""), command)
    return {model["model"]: model for model in content["models"]}, told


def _measure_by_context(
    reader: Reader, source: str, contexts: Sequence[int], windows: int, before: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """What is told of the windows, and the rows so far; `before` is what the file tells of the model."""
    stream = reader.stream(source)
    starts = before.get("starts")
    if starts and starts[0] >= contexts[-1]:
        window, done = before["window"], [Row.from_dict(row) for row in before["rows"]]
    else:
        window, done = default_window(reader, contexts), []
        starts = window_starts(len(stream), contexts[-1], window, windows)
    wanted = sorted({*contexts, *(row.context for row in done)})
    for rows in by_context(reader, stream, contexts, window=window, starts=starts, done=done):
        yield {"contexts": wanted, "window": window, "starts": starts}, rows


def _measure_by_position(
    reader: Reader, source: str, lengths: Sequence[int], parts: int, before: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """What is told of the texts, and all rows: they come of one reading."""
    length = lengths[-1]
    if before.get("length") == length:
        yield {"length": length, "texts": before["texts"]}, [Row.from_dict(row) for row in before["rows"]]
        return
    texts, told = _texts(reader, source, length)
    yield {"length": length, "texts": told}, by_position(reader, texts, length, parts=parts)


def _texts(reader: Reader, source: str, length: int) -> tuple[list[Tokens], str]:
    """Each document that is long enough, if there are several, or else all of them joined; and which it was."""
    found = documents(source, "held-out" if source == BUNDLED else "train")
    texts = [encode_stream([text], reader.tokenizer) for text in found]
    if not texts:
        raise UserError(f"{source} has no documents; at least one is needed")
    long_enough = [text for text in texts if len(text) >= length]
    if len(long_enough) > 1:
        return long_enough, f"each of {len(long_enough):,} documents"
    joined = min(len(texts), int(np.searchsorted(np.cumsum([len(text) for text in texts]), length)) + 1)
    return [np.concatenate(texts)], "one document" if joined == 1 else f"{joined:,} documents joined as one text"
