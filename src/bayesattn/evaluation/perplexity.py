"""Perplexity with growing context: of the same tokens after more text, or by position in long texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import BUNDLED, Split, documents
from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import half_interval
from bayesattn.evaluation.reader import Reader
from bayesattn.files import content_of, earlier_results, joined_commands, write_results

KIND = "perplexity"
# Tokens per forward pass when a whole text is read.
CHUNK = 2048
# Tokens of a stretch, about. If there is one text only, the interval of a part comes from its stretches.
STRETCH = 32
# Tokens of a part. The first token of a text has no loss, and an interval needs two losses.
LEAST_PART = 3
# A loss with a perplexity that is still a number, and where the bounds of its interval are cut.
MOST_LOSS, MOST_EXPONENT = 200.0, 690.0

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Perplexity with one number of tokens before, with 95% intervals.

    Args:
        context: tokens before the windows, or before the part.
        windows: samples of the intervals: windows, texts or stretches.
        perplexity, low, high: the estimate and its interval.
        change, change_low, change_high: the loss minus that of the first row. By context, both are on the same windows,
            so that the interval is narrower than those of the two losses.
        seconds: of the measurement.
        losses: mean loss of each sample.
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
        known = {field.name: row[field.name] for field in fields(cls)}
        return cls(**{**known, "losses": tuple(row["losses"])})


class _Sampled(NamedTuple):
    """A mean loss, and the losses of the samples for its interval."""

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
    """Perplexity of the same windows after more and more of the text before; yields the rows so far after each context.

    Args:
        reader: the model and its tokenizer.
        stream: the text as tokens.
        contexts: tokens before each window.
        window: tokens of each window; the default is `default_window`.
        windows: number of windows, spread evenly over the text that has the longest context before it.
        starts: where windows begin, if known; then `windows` has no effect.
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
    """The training length less the shortest context, and at least 32 tokens."""
    return max(32, reader.train_length - min(contexts))


def _rows(measured: Mapping[int, tuple[Losses, float]]) -> list[Row]:
    """Rows from the shortest context to the longest; changes are against the shortest, whenever it was measured."""
    sampled = {context: _Sampled(float(losses.mean()), losses) for context, (losses, _) in measured.items()}
    first = sampled[min(sampled)]
    return [_row(context, sampled[context], first, measured[context][1]) for context in sorted(sampled)]


def _check_length(reader: Reader, length: int) -> None:
    most = reader.most_positions
    if most is not None and length > most:
        raise UserError(f"{reader.name} has positions for {most:,} tokens; {length:,} are asked for")
    reader.check_length(length)


def window_starts(tokens: int, first: int, window: int, windows: int) -> list[int]:
    """Where windows begin, spread evenly over a text from token `first` on; as many as do not overlap."""
    windows = min(windows, (tokens - first) // max(1, window))
    if window < 2 or windows < 2:
        raise UserError(
            f"the text has {tokens:,} tokens; two windows of {window:,} with {first:,} before them do not fit in it"
        )
    return np.linspace(first, tokens - window, windows).astype(int).tolist()


def _window_loss(reader: Reader, stream: Tokens, start: int, context: int, window: int) -> float:
    """Mean loss of the tokens of a window after its first: the same tokens for every context."""
    ids = torch.from_numpy(stream[start - context : start + window].astype(np.int64))[None].to(reader.model.device)
    logits = reader.last_logits(ids, window)[0, :-1].float()
    return cross_entropy(logits, ids[0, 1 - window :]).item()


def _row(context: int, loss: _Sampled, first: _Sampled, seconds: float) -> Row:
    if not loss.samples.max() < MOST_LOSS:
        raise UserError(f"a mean loss is {loss.samples.max():.3g} nats; perplexity is measured below {MOST_LOSS:g}")
    error, change = half_interval(loss.samples), loss.mean - first.mean
    change_error = half_interval(loss.samples - first.samples)
    return Row(
        context=context,
        windows=len(loss.samples),
        perplexity=math.exp(loss.mean),
        low=math.exp(max(-MOST_EXPONENT, loss.mean - error)),
        high=math.exp(min(MOST_EXPONENT, loss.mean + error)),
        change=change,
        change_low=change - change_error,
        change_high=change + change_error,
        seconds=seconds,
        losses=tuple(loss.samples.tolist()),
    )


def effective_context(rows: Sequence[Row]) -> int:
    """The shortest context after which no longer one lowers the loss significantly."""
    best = rows[0]
    for row in rows[1:]:
        # Both changes are against the same first row, so that disjoint intervals mean different losses.
        if row.change_high < best.change_low or (best is rows[0] and row.change_high < 0):
            best = row
    return best.context


def by_position(reader: Reader, texts: Sequence[Tokens], length: int, *, parts: int = 16) -> list[Row]:
    """Perplexity by position: the first `length` tokens of each text, read once and divided into equal parts.

    A row's context is the position where its part begins. The first token of a text has no loss. Intervals are over
    texts; if there is one text only, over stretches of about 32 tokens of the part. Changes compare different tokens.

    Raises:
        UserError: no text is long enough, or the length is too short for the parts.
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
    # The loss at index i is that of token i + 1.
    divided = [losses[:, max(0, start - 1) : stop - 1] for start, stop in pairwise(edges)]
    # Changes pair the stretches of two parts, so that every part has as many, although the first is a token shorter.
    stretches = max(2, round(min(part.shape[1] for part in divided) / STRETCH))
    sampled = [_sampled(part, stretches) for part in divided]
    return [_row(start, one, sampled[0], seconds / parts) for start, one in zip(edges, sampled, strict=False)]


def _sampled(part: Losses, stretches: int) -> _Sampled:
    """Samples of the losses `[texts, tokens]` of a part."""
    samples = [text.mean() for text in (part if len(part) > 1 else np.array_split(part[0], stretches))]
    return _Sampled(float(part.mean()), np.array(samples))


def _token_losses(reader: Reader, text: Tokens) -> Losses:
    """Losses of every token but the first, read once with a cache."""
    ids = torch.from_numpy(text.astype(np.int64))[None].to(reader.model.device)
    past, losses = None, []
    with reader.checked_model() as model, torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, CHUNK):
            part = ids[:, start : min(start + CHUNK, ids.shape[1] - 1)]
            out = model(input_ids=part, past_key_values=past, use_cache=True)
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
    """Rows by model, saved in a file as they grow. By position, the longest of the lengths is read.

    Rows that the file has already are not measured again. You may add contexts later: they use the windows of the file
    if these have enough text before them. If not, or by position with another length, the model is measured again.

    Raises:
        UserError: the file has results of another text, or of another number of windows.
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
        for details, rows in measure(reader, source, sorted(set(lengths(reader))), windows, before):
            details |= {"effective_context": effective_context(rows), "rows": [row.to_dict() for row in rows]}
            kept[reader.name] = {**known, **details}
            write_results(file, KIND, {**settings, "command": command, "models": list(kept.values())})
            results[reader.name] = rows
            yield results


def _kept(file: Path, settings: Mapping[str, Any], command: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Models in a result file, by name, and the commands that made it."""
    content = earlier_results(file, KIND)
    if content is None:
        return {}, command
    if differing := sorted(key for key, value in settings.items() if content.get(key) != value):
        raise UserError(f"{file} holds another evaluation, with other {', '.join(differing)}; choose another file")
    commands = joined_commands(content.get("command", ""), command)
    return {model["model"]: model for model in content["models"]}, commands


def _measure_by_context(
    reader: Reader, source: str, contexts: Sequence[int], windows: int, before: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Details of the windows for the file, and the rows so far; `before` is what the file has of the model."""
    stream = reader.stream(source)
    starts, window = before.get("starts", []), before.get("window", 0)
    done = [Row.from_dict(row) for row in before.get("rows", ())]
    same = starts and window and all(len(row.losses) == len(starts) for row in done)
    if not same or min(starts) < contexts[-1] or max(starts) + window > len(stream):
        window, done = default_window(reader, contexts), []
        starts = window_starts(len(stream), contexts[-1], window, windows)
    wanted = sorted({*contexts, *(row.context for row in done)})
    for rows in by_context(reader, stream, contexts, window=window, starts=starts, done=done):
        yield {"contexts": wanted, "window": window, "starts": starts}, rows


def _measure_by_position(
    reader: Reader, source: str, lengths: Sequence[int], parts: int, before: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Details of the texts for the file, and all rows at once: the texts are read once."""
    length = lengths[-1]
    if before.get("length") == length and "texts" in before:
        yield {"length": length, "texts": before["texts"]}, [Row.from_dict(row) for row in before["rows"]]
        return
    texts, description = _texts(reader, source, length)
    yield {"length": length, "texts": description}, by_position(reader, texts, length, parts=parts)


def _texts(reader: Reader, source: str, length: int) -> tuple[list[Tokens], str]:
    """The documents that are long enough if there are several, else all documents joined; and which of these."""
    split: Split = "held-out" if source == BUNDLED else "train"
    texts = [encode_stream([text], reader.tokenizer) for text in documents(source, split)]
    if not texts:
        raise UserError(f"{source} has no documents; at least one is needed")
    long_enough = [text for text in texts if len(text) >= length]
    if len(long_enough) > 1:
        return long_enough, f"each of {len(long_enough):,} documents"
    joined = min(len(texts), int(np.searchsorted(np.cumsum([len(text) for text in texts]), length)) + 1)
    return [np.concatenate(texts)], "one document" if joined == 1 else f"{joined:,} documents joined as one text"
