"""Perplexity with growing context: of the same tokens after more text, or by position in long texts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
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
from bayesattn.studies.perplexity.run import Loss, ModelLosses
from bayesattn.studies.study import Progress

# Tokens per forward pass when a whole text is read.
CHUNK = 2048
# Tokens of a stretch, about. If there is one text only, the interval of a part comes from its stretches.
STRETCH = 32
# Tokens of a part. The first token of a text has no loss, and an interval needs two losses.
LEAST_PART = 3
# Samples of an interval.
LEAST_SAMPLES = 2
# A loss with a perplexity that is still a number, and where the bounds of its interval are cut.
MOST_LOSS, MOST_EXPONENT = 200.0, 690.0
# How the description of texts begins of which only some were read.
UNFINISHED = "the first"

Losses = NDArray[np.float64]


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
    done: Sequence[Loss] = (),
    progress: Progress[Any] | None = None,
) -> Iterator[list[Loss]]:
    """Perplexity of the same windows after more and more of the text before; yields the rows so far after each context,
    and now and then in between.

    With a budget, contexts share evenly what is left of it, and a context has as many of the windows as that allows. A
    change is on the windows that both contexts have.

    Args:
        reader: the model and its tokenizer.
        stream: the text as tokens.
        contexts: tokens before each window.
        window: tokens of each window; the default is `default_window`.
        windows: number of windows, spread evenly over the text that has the longest context before it.
        starts: where windows begin, if known; then `windows` has no effect.
        done: rows of the same windows, which are not measured again.
        progress: the budget, and who is told.
    """
    progress, contexts = progress or Progress(), sorted(set(contexts))
    window = window or default_window(reader, contexts)
    starts = starts or window_starts(len(stream), contexts[-1], window, windows)
    _check_length(reader, contexts[-1] + window)
    measured = {row.context: (np.array(row.losses), row.seconds) for row in done}
    if measured:
        yield _rows(measured)
    missing = [context for context in contexts if context not in measured or len(measured[context][0]) < len(starts)]
    for number, context in enumerate(missing):
        if measured and progress.left() <= 0:
            return
        enough = progress.left() * (1 - 1 / (len(missing) - number))  # is left for the contexts after this one
        losses, seconds = measured.get(context, (np.array([]), 0.0))
        for start in starts[len(losses) :]:
            progress.step(f"{reader.name}, {context:,} tokens before, window", len(losses), len(starts))
            begin = time.perf_counter()
            losses = np.append(losses, _window_loss(reader, stream, start, context, window))
            seconds += time.perf_counter() - begin
            if len(losses) < LEAST_SAMPLES:
                continue
            measured[context] = losses, seconds
            if progress.left() < enough:
                break
            if progress.is_due():
                yield _rows(measured)
        yield _rows(measured)


def default_window(reader: Reader, contexts: Sequence[int]) -> int:
    """The training length less the shortest context, and at least 32 tokens."""
    return max(32, reader.train_length - min(contexts))


def _rows(measured: Mapping[int, tuple[Losses, float]]) -> list[Loss]:
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


def _row(context: int, loss: _Sampled, first: _Sampled, seconds: float) -> Loss:
    if not loss.samples.max() < MOST_LOSS:
        raise UserError(f"a mean loss is {loss.samples.max():.3g} nats; perplexity is measured below {MOST_LOSS:g}")
    error, shared = half_interval(loss.samples), min(len(loss.samples), len(first.samples))
    changes = loss.samples[:shared] - first.samples[:shared]
    whole = len(loss.samples) == len(first.samples)
    change, change_error = loss.mean - first.mean if whole else float(changes.mean()), half_interval(changes)
    return Loss(
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


def effective_context(rows: Sequence[Loss]) -> int:
    """The shortest context after which no longer one lowers the loss significantly."""
    best = rows[0]
    for row in rows[1:]:
        # Both changes are against the same first row, so that disjoint intervals mean different losses.
        if row.change_high < best.change_low or (best is rows[0] and row.change_high < 0):
            best = row
    return best.context


def by_position(reader: Reader, texts: Sequence[Tokens], length: int, *, parts: int = 16) -> list[Loss]:
    """Perplexity by position: the first `length` tokens of each text, read once and divided into equal parts.

    A row's context is the position where its part begins. The first token of a text has no loss. Intervals are over
    texts; if there is one text only, over stretches of about 32 tokens of the part. Changes compare different tokens.

    Raises:
        UserError: no text is long enough, or the length is too short for the parts.
    """
    *_, (_, rows) = read_by_position(reader, texts, length, parts=parts)
    return rows


def read_by_position(
    reader: Reader,
    texts: Sequence[Tokens],
    length: int,
    *,
    parts: int,
    done: Sequence[Loss] = (),
    progress: Progress[Any] | None = None,
) -> Iterator[tuple[str, list[Loss]]]:
    """`by_position`, step by step: what of the texts is read (empty for all of it), and the rows of that.

    Of several texts, as many are read as the budget allows, at least two, and `done` has the rows of the first ones. Of
    one text, the parts are read in turn.
    """
    progress = progress or Progress()
    if length < LEAST_PART * parts:
        raise UserError(f"{length:,} tokens are asked for; {parts} parts need at least {LEAST_PART * parts}")
    long_enough = [text[:length] for text in texts if len(text) >= length]
    if not long_enough:
        longest = max((len(text) for text in texts), default=0)
        raise UserError(f"no text has {length:,} tokens; the longest has {longest:,}")
    _check_length(reader, length)
    edges = np.linspace(0, length, parts + 1).astype(int).tolist()
    # The loss at index i is that of token i + 1.
    slices = [slice(max(0, start - 1), stop - 1) for start, stop in pairwise(edges)]
    if len(long_enough) == 1:
        yield from _read_one(reader, long_enough[0], edges, slices, progress)
        return
    means = [list(each) for each in zip(*(row.losses for row in done), strict=True)]  # of the parts of each text
    seconds = sum(row.seconds for row in done)
    for number in range(len(means), len(long_enough)):
        begin = time.perf_counter()
        what = f"text {number + 1} of {len(long_enough)}, tokens"
        *_, losses = _token_losses(reader, long_enough[number], progress, what)
        means.append([float(losses[part].mean()) for part in slices])
        seconds += time.perf_counter() - begin
        whole = len(means) == len(long_enough)
        if whole or (len(means) >= LEAST_SAMPLES and (progress.is_due() or progress.left() <= 0)):
            sampled = [_Sampled(float(np.mean(each)), np.array(each)) for each in zip(*means, strict=True)]
            rows = [
                _row(start, one, sampled[0], seconds / len(slices)) for start, one in zip(edges, sampled, strict=False)
            ]
            yield "" if whole else f"{UNFINISHED} {len(means)} of {len(long_enough):,} documents", rows
            if progress.left() <= 0:
                return


def _read_one(
    reader: Reader, text: Tokens, edges: Sequence[int], slices: Sequence[slice], progress: Progress[Any]
) -> Iterator[tuple[str, list[Loss]]]:
    # Changes pair the stretches of two parts, so that every part has as many, although the first is a token shorter.
    stretches = max(LEAST_SAMPLES, round(min(part.stop - part.start for part in slices) / STRETCH))
    begin = time.perf_counter()
    for losses in _token_losses(reader, text, progress, "tokens"):
        read = [part for part in slices if part.stop <= len(losses)]
        whole, out_of_time = len(read) == len(slices), progress.left() <= 0
        if not read or not (whole or out_of_time or progress.is_due()):
            continue
        sampled = [_sampled(losses[part], stretches) for part in read]
        seconds = (time.perf_counter() - begin) / len(read)
        rows = [_row(start, one, sampled[0], seconds) for start, one in zip(edges, sampled, strict=False)]
        yield "" if whole else f"{UNFINISHED} {edges[len(read)]:,}", rows
        if out_of_time:
            return


def _sampled(part: Losses, stretches: int) -> _Sampled:
    """Samples of the losses of a part of one text."""
    return _Sampled(float(part.mean()), np.array([stretch.mean() for stretch in np.array_split(part, stretches)]))


def _token_losses(reader: Reader, text: Tokens, progress: Progress[Any], what: str) -> Iterator[Losses]:
    """Losses of every token but the first, read once with a cache; yields those so far after each chunk."""
    ids = torch.from_numpy(text.astype(np.int64))[None].to(reader.model.device)
    past, losses = None, []
    with reader.checked_model() as model, torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, CHUNK):
            progress.step(f"{reader.name}, {what}", start, ids.shape[1])
            part = ids[:, start : min(start + CHUNK, ids.shape[1] - 1)]
            out = model(input_ids=part, past_key_values=past, use_cache=True)
            past = out.past_key_values
            targets = ids[0, start + 1 : start + 1 + part.shape[1]]
            losses.append(cross_entropy(out.logits[0].float(), targets, reduction="none").double().cpu().numpy())
            yield np.concatenate(losses)


def measure_by_context(
    progress: Progress[Any],
    reader: Reader,
    source: str,
    contexts: Sequence[int],
    windows: int,
    before: ModelLosses | None,
) -> Iterator[tuple[dict[str, Any], list[Loss]]]:
    """Details of the windows, and the rows so far; `before` is what is known of the model."""
    stream = reader.stream(source)
    starts, window, done = (before.starts, before.window, before.rows) if before else (None, None, [])
    known = starts and window and all(len(row.losses) <= len(starts) for row in done)
    if not known or min(starts) < contexts[-1] or max(starts) + window > len(stream):  # type: ignore[arg-type, operator]
        window, done = default_window(reader, contexts), []
        starts = window_starts(len(stream), contexts[-1], window, windows)
    wanted = sorted({*contexts, *(row.context for row in done)})
    for rows in by_context(reader, stream, contexts, window=window, starts=starts, done=done, progress=progress):
        yield {"contexts": wanted, "window": window, "starts": starts}, rows


def measure_by_position(
    progress: Progress[Any],
    reader: Reader,
    source: str,
    lengths: Sequence[int],
    parts: int,
    before: ModelLosses | None,
) -> Iterator[tuple[dict[str, Any], list[Loss]]]:
    """Details of the texts, and the rows so far."""
    length, done = lengths[-1], []
    if before is not None and before.length == length and before.texts is not None:
        if not before.texts.startswith(UNFINISHED):
            yield {"length": length, "texts": before.texts}, before.rows
            return
        done = before.rows if "documents" in before.texts else []
    progress.step(f"encoding {source}")
    texts, description = _texts(reader, source, length)
    for read, rows in read_by_position(reader, texts, length, parts=parts, done=done, progress=progress):
        yield (
            {
                "length": length,
                "texts": f"{read} of {description}" if read and "documents" not in read else read or description,
            },
            rows,
        )


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
