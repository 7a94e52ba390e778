from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesattn as ba
from bayesattn.data.contexts import Tokens, encode_stream
from bayesattn.data.text import documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.evaluation.intervals import half_interval, student
from bayesattn.evaluation.reader import Reader
from bayesattn.studies.perplexity import measure as perplexity
from bayesattn.studies.perplexity.measure import by_context, by_position, effective_context
from bayesattn.studies.perplexity.run import Loss, Perplexity
from bayesattn.studies.perplexity.show import tables
from tests.studies.saved import run_perplexity

STREAM = np.random.default_rng(0).integers(2, 1024, 3000).astype(np.int32)


def reader() -> Reader:
    torch.manual_seed(0)
    config = ba.BamConfig(vocab_size=1024, hidden_size=16, num_attention_heads=2, training_length=64)
    return Reader("mine", ba.BamForCausalLM(config).eval(), load_tokenizer("tokenizer"), 64)


def last(growing: Iterator[list[Loss]]) -> list[Loss]:
    *_, rows = growing
    return rows


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    ignorant = reader()
    torch.nn.init.zeros_(ignorant.model.lm_head.weight)
    for row in last(by_context(ignorant, STREAM, [500, 0, 64], windows=5)):
        assert row.perplexity == pytest.approx(1024, rel=1e-4)
        assert row.change == pytest.approx(0, abs=1e-6)
    for row in by_position(ignorant, [STREAM], 2500, parts=4):
        assert row.perplexity == pytest.approx(1024, rel=1e-4)


def test_it_is_the_loss_of_the_window_alone() -> None:
    mine = reader()
    rows = last(by_context(mine, STREAM[:140], [20], window=60, windows=2))
    losses = []
    for start in (0, 60):
        ids = torch.from_numpy(STREAM[start : start + 80].astype("int64"))[None]
        labels = ids.clone()
        labels[:, :21] = -100  # the first token of the window has nobody in it to predict it
        losses.append(mine.model(ids, labels=labels).loss.item())
    assert rows[0].perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_long_texts_are_read_in_chunks_with_the_same_loss() -> None:
    mine, sizes = reader(), []
    starts, window = perplexity.window_starts(len(STREAM), 900, 50, 3), 50
    plain = []
    for start in starts:
        ids = torch.from_numpy(STREAM[start - 900 : start + window].astype("int64"))[None]
        logits = mine.model(ids).logits[0, -window:-1]
        plain.append(torch.nn.functional.cross_entropy(logits, ids[0, 1 - window :]).item())
    mine.model.model.layers[0].register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[1]))
    mine.model.model.chunk_size = 100
    rows = last(by_context(mine, STREAM, [900], window=window, windows=3))
    assert max(sizes) == 100
    assert rows[0].losses == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("texts", [[STREAM], [STREAM, STREAM[::-1].copy(), STREAM[:10]]])
def test_by_position_every_token_counts_once(texts: list[Tokens]) -> None:
    mine = reader()
    torch.nn.init.normal_(mine.model.lm_head.weight)  # so that one token more or less can be seen
    rows = by_position(mine, texts, 2600, parts=20)
    losses = []
    for text in (text for text in texts if len(text) >= 2600):
        ids = torch.from_numpy(text[:2600].astype("int64"))[None]
        losses.append(torch.nn.functional.cross_entropy(mine.model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    edges = [0, *range(129, 2599, 130), 2599]
    parts = [torch.stack(losses)[:, start:stop].mean().item() for start, stop in pairwise(edges)]
    assert [math.log(row.perplexity) for row in rows] == pytest.approx(parts, rel=1e-4)
    assert [row.change for row in rows] == pytest.approx([part - parts[0] for part in parts], abs=1e-3)
    assert [row.context for row in rows] == list(range(0, 2600, 130))
    assert {row.windows for row in rows} == {4 if len(texts) == 1 else 2}


def test_students_t_is_that_of_tables() -> None:
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 10: 2.22814, 63: 1.99834, 1000: 1.96234}
    for freedom, quantile in table.items():
        assert student(freedom) == pytest.approx(quantile, rel=2e-6)
    assert student(5, 0.99) == pytest.approx(4.03214, rel=2e-6)


@pytest.mark.parametrize("number", [3, 64])
def test_intervals_cover_the_mean_in_95_percent(number: int) -> None:
    drawn = np.random.default_rng(number).normal(2.0, 0.3, (4000, number))
    covered = np.mean([abs(samples.mean() - 2.0) <= half_interval(samples) for samples in drawn])
    assert 0.94 < covered < 0.96


def row(context: int, change: float, error: float = 0.01) -> Loss:
    return Loss(context, 64, 10.0, 9.0, 11.0, change, change - error, change + error, 0.0, (2.3, 2.3))


def test_effective_context_is_where_more_stops_helping() -> None:
    assert effective_context([row(0, 0, 0), row(128, -0.2), row(512, -0.3), row(2048, -0.305), row(8192, -0.1)]) == 512
    assert effective_context([row(0, 0, 0), row(128, 0.5)]) == 0


def test_windows_do_not_overlap() -> None:
    rows = last(by_context(reader(), STREAM[:300], [0, 4]))
    assert [row.windows for row in rows] == [4, 4]


def test_the_shortest_parts_have_an_interval() -> None:
    assert [row.windows for row in by_position(reader(), [STREAM], 48)] == [2] * 16


def test_a_text_without_room_for_two_windows_is_refused() -> None:
    with pytest.raises(UserError, match="has 10 tokens; two windows of 64 with 4 before them do not fit in it"):
        list(by_context(reader(), STREAM[:10], [0, 4]))


@pytest.mark.parametrize(
    ("length", "sentence"),
    [
        (10, "10 tokens are asked for; 16 parts need at least 48"),
        (5000, "no text has 5,000 tokens; the longest has 3,000"),
    ],
)
def test_lengths_that_texts_do_not_have_are_refused(length: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        by_position(reader(), [STREAM], length)


def few_positions() -> Reader:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=1024, n_positions=64)
    return replace(reader(), name="few", model=GPT2LMHeadModel(config).eval())


def test_contexts_beyond_the_positions_are_refused() -> None:
    with pytest.raises(UserError, match="few has positions for 64 tokens; 96 are asked for"):
        list(by_context(few_positions(), STREAM, [0, 32]))


def test_lengths_beyond_the_positions_are_refused() -> None:
    with pytest.raises(UserError, match="few has positions for 64 tokens; 500 are asked for"):
        by_position(few_positions(), [STREAM], 500)


def write_texts(folder: Path, *words: int) -> str:
    random = np.random.default_rng(0)
    folder.mkdir()
    for number, size in enumerate(words):
        text = " ".join(str(word) for word in random.integers(0, 1000, size))
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def without_seconds(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    for row in (row for model in content["models"] for row in model["rows"]):
        del row["seconds"]
    return content


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Model, context and start of every window that was read, and model of every text."""
    calls: list[tuple[Any, ...]] = []
    window_loss, token_losses = perplexity._window_loss, perplexity._token_losses

    def window(one: Reader, stream: Tokens, start: int, context: int, size: int) -> float:
        calls.append((one.name, context, start))
        return window_loss(one, stream, start, context, size)

    def text(one: Reader, tokens: Tokens, *rest: Any) -> Iterator[perplexity.Losses]:
        calls.append((one.name, len(tokens)))
        return token_losses(one, tokens, *rest)

    monkeypatch.setattr(perplexity, "_window_loss", window)
    monkeypatch.setattr(perplexity, "_token_losses", text)
    return calls


@pytest.mark.parametrize("by", ["context", "position"])
def test_a_run_stopped_after_any_row_ends_as_one_that_was_not(
    by: str, tmp_path: Path, measured: list[tuple[Any, ...]]
) -> None:
    source = write_texts(tmp_path / "texts", 400)
    models = [replace(reader(), name="first", fingerprint="1"), replace(reader(), name="second", fingerprint="2")]
    torch.nn.init.normal_(models[1].model.lm_head.weight)

    def run(file: Path) -> Iterator[Perplexity]:
        return run_perplexity(models, source, lambda _: [0, 16, 40], file, by=by, windows=4)

    whole = tmp_path / "whole.json"
    count = sum(1 for _ in run(whole))
    assert count == (6 if by == "context" else 2)
    once = measured.copy()
    for stop in range(1, count + 1):
        measured.clear()
        file = tmp_path / f"{stop}.json"
        for _ in islice(run(file), stop):
            pass
        stopped = without_seconds(file)
        next(run(file))  # stopped again, as soon as anything is written
        assert without_seconds(file) == stopped
        *_, result = run(file)
        assert measured == once
        assert without_seconds(file) == without_seconds(whole)
        assert {entry.model: len(entry.rows) for entry in result.models} == dict.fromkeys(
            ("first", "second"), 3 if by == "context" else 4
        )


def test_other_contexts_join_those_of_the_same_windows(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    source, file, mine = write_texts(tmp_path / "texts", 400), tmp_path / "perplexity.json", reader()

    def run(contexts: list[int], one: Reader = mine) -> list[int]:
        """Contexts that are measured for it."""
        measured.clear()
        for _ in run_perplexity([one], source, lambda _: contexts, file, windows=4):
            pass
        return sorted({context for _, context, _ in measured})

    def kept(model: int = 0) -> list[int]:
        return [row["context"] for row in json.loads(file.read_text())["models"][model]["rows"]]

    assert run([16, 40]) == [16, 40]
    assert run([0, 16]) == [0]
    assert kept() == [0, 16, 40]
    rows = json.loads(file.read_text())["models"][0]["rows"]
    changes = [np.mean(np.subtract(row["losses"], rows[0]["losses"])) for row in rows]
    assert [row["change"] for row in rows] == pytest.approx(changes, abs=1e-9)
    assert run([0, 16], replace(mine, name="other")) == [0, 16]
    assert [kept(0), kept(1)] == [[0, 16, 40], [0, 16]]
    assert run([0, 100]) == [0, 100]  # not so much stands before the windows
    assert [kept(0), kept(1)] == [[0, 100], [0, 16]]
    assert run([0, 100], replace(mine, fingerprint="trained on")) == [0, 100]


@pytest.mark.parametrize(
    ("settings", "change", "differing"),
    [
        ({"windows": 5}, lambda file: None, "windows"),
        ({"by": "position"}, lambda file: None, "by"),
        ({"text": "bundled"}, lambda file: None, "text"),
        ({}, lambda file: file.rename(file.with_name("2.txt")), "content"),
        ({}, lambda file: file.write_text(file.read_text() + " more"), "content"),
    ],
)
def test_another_evaluation_is_not_mixed_in(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[Path], object], differing: str
) -> None:
    source, file, mine = write_texts(tmp_path / "texts", 400, 300), tmp_path / "perplexity.json", reader()

    def run(text: str = source, by: str = "context", windows: int = 4) -> None:
        for _ in run_perplexity([mine], text, lambda _: [0, 16], file, by=by, windows=windows):
            pass

    run()
    (tmp_path / "texts" / "notes.md").write_text("Not a document.")
    run()
    before = file.read_text()
    change(tmp_path / "texts" / "0.txt")
    with pytest.raises(UserError, match=f"holds another evaluation, with other {differing}; choose another file"):
        run(**settings)
    assert file.read_text() == before


def test_by_position_documents_are_read_one_by_one_if_several_are_long_enough(
    tmp_path: Path, measured: list[tuple[Any, ...]]
) -> None:
    source, file = write_texts(tmp_path / "texts", 10, 300, 200, 10), tmp_path / "perplexity.json"
    sizes = [len(encode_stream([text], reader().tokenizer)) for text in documents(source)]
    assert sizes[0] < 100 < sizes[2] < sizes[1]

    def run(length: int) -> tuple[str, list[Loss]]:
        measured.clear()
        *_, result = run_perplexity([reader()], source, lambda _: [0, length], file, by="position", windows=4)
        (entry,) = result.models
        assert entry.length == length
        return str(entry.texts), entry.rows

    description, rows = run(100)
    assert description == "each of 2 documents"
    assert measured == [("mine", 100)] * 2
    assert [row.windows for row in rows] == [2] * 4
    description, rows = run(sizes[2] + 10)
    assert description == "2 documents joined as one text"
    assert measured == [("mine", sizes[2] + 10)]
    joined = by_position(reader(), [reader().stream(source)], sizes[2] + 10, parts=4)
    assert [row.losses for row in rows] == [row.losses for row in joined]
    with pytest.raises(UserError, match=f"no text has 9,000 tokens; the longest has {sum(sizes):,}"):
        run(9000)


def test_only_by_context_windows_are_called_the_same(tmp_path: Path) -> None:
    from bayesattn.report.page import make_page

    source = write_texts(tmp_path / "texts", 400)
    for by in ("context", "position"):
        file = tmp_path / f"{by}.json"
        *_, result = run_perplexity([reader()], source, lambda _: [0, 100], file, by=by, windows=4)
        caption = tables(result)[0].caption  # type: ignore[union-attr]
        for text in (str(caption), make_page([file])):
            assert ("on the same windows" in text) == (by == "context")
            assert ("of other tokens" in text) == (by == "position")
    assert "100 tokens of one document were read" in make_page([file])
