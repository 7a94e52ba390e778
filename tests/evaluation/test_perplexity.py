from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.evaluation import perplexity
from bayesattn.evaluation.perplexity import Row, by_context, by_position, effective_context
from bayesattn.evaluation.reader import Reader

STREAM = np.random.default_rng(0).integers(2, 1024, 3000).astype(np.int32)


def reader() -> Reader:
    torch.manual_seed(0)
    config = ba.BamConfig(vocab_size=1024, hidden_size=16, num_attention_heads=2, training_length=64)
    return Reader("mine", ba.BamForCausalLM(config).eval(), load_tokenizer("tokenizer"), 64)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    ignorant = reader()
    torch.nn.init.zeros_(ignorant.model.lm_head.weight)
    for row in by_context(ignorant, STREAM, [500, 0, 64], windows=5):
        assert row.perplexity == pytest.approx(1024, rel=1e-4)
        assert row.change == pytest.approx(0, abs=1e-6)
    for row in by_position(ignorant, [STREAM], 2500, parts=4):
        assert row.perplexity == pytest.approx(1024, rel=1e-4)


def test_it_is_the_loss_of_the_window_alone() -> None:
    mine = reader()
    rows = list(by_context(mine, STREAM[:140], [20], window=60, windows=2))
    losses = []
    for start in (0, 60):
        ids = torch.from_numpy(STREAM[start : start + 80].astype("int64"))[None]
        labels = ids.clone()
        labels[:, :21] = -100  # the first token of the window has nobody in it to predict it
        losses.append(mine.model(ids, labels=labels).loss.item())
    assert rows[0].perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_by_position_every_token_counts_once() -> None:
    mine = reader()
    rows = by_position(mine, [STREAM, STREAM[::-1].copy(), STREAM[:10]], 2600, parts=5)
    losses = []
    for text in (STREAM, STREAM[::-1].copy()):
        ids = torch.from_numpy(text[:2600].astype("int64"))[None]
        losses.append(mine.model(ids, labels=ids).loss.item())
    sizes = [519, 520, 520, 520, 520]
    mean = sum(math.log(row.perplexity) * size for row, size in zip(rows, sizes, strict=True)) / sum(sizes)
    assert mean == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert [row.context for row in rows] == [0, 520, 1040, 1560, 2080]


def row(context: int, change: float, error: float = 0.01) -> Row:
    return Row(context, 64, 10.0, 9.0, 11.0, change, change - error, change + error, 0.0)


def test_effective_context_is_where_more_stops_helping() -> None:
    assert effective_context([row(0, 0, 0), row(128, -0.2), row(512, -0.3), row(2048, -0.305), row(8192, -0.1)]) == 512
    assert effective_context([row(0, 0, 0), row(128, 0.5)]) == 0


def test_texts_that_are_too_short_get_one_sentence() -> None:
    with pytest.raises(ValueError, match="has 10 tokens; two windows of 64 with 4 before them do not fit in it"):
        list(by_context(reader(), STREAM[:10], [0, 4]))
    assert [row.windows for row in by_context(reader(), STREAM[:300], [0, 4])] == [4, 4]  # none overlaps another
    with pytest.raises(ValueError, match="10 tokens are asked for; 16 parts need at least 32"):
        by_position(reader(), [STREAM], 10)
    with pytest.raises(ValueError, match="no text has 5,000 tokens; the longest has 3,000"):
        by_position(reader(), [STREAM], 5000)


def test_no_more_is_read_than_there_are_positions() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=1024, n_positions=64)
    few = replace(reader(), name="few", model=GPT2LMHeadModel(config).eval())
    with pytest.raises(ValueError, match="few has positions for 64 tokens; 96 are asked for"):
        list(by_context(few, STREAM, [0, 32]))
    with pytest.raises(ValueError, match="few has positions for 64 tokens; 500 are asked for"):
        by_position(few, [STREAM], 500)


def test_finished_models_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, first = tmp_path / "perplexity.json", replace(reader(), name="first", fingerprint="1")
    models = [first, replace(reader(), name="second", fingerprint="2")]
    measured: list[str] = []

    def counted(one: Reader, *arguments: Any, **settings: Any) -> Iterator[Row]:
        measured.append(one.name)
        yield from by_context(one, *arguments, **settings)

    monkeypatch.setattr(perplexity, "by_context", counted)

    def run(readers: list[Reader], windows: int = 4) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for found in perplexity.run(readers, "bundled", lambda _: [0, 16], file, windows=windows):
            if found.keys() == {"first", "second"} and len(measured) == 2 and len(found["second"]) == 1:
                break  # as if killed
        return found

    run(models)
    assert measured == ["first", "second"]
    whole = run(models)
    assert measured == ["first", "second", "second"]
    assert [len(rows) for rows in whole.values()] == [2, 2]
    assert run(models) == whole
    run([replace(reader(), name="third")])
    kept = [model["model"] for model in json.loads(file.read_text())["models"]]
    assert kept == ["first", "second", "third"]
    assert measured.pop() == "third"
    run([replace(first, fingerprint="other")])
    run([first], windows=5)
    assert measured[3:] == ["first", "first"]
