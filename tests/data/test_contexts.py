from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesattn.data.contexts import Contexts, Mixture, StreamedContexts, encode_stream
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return encode_stream(
        [f"Document {i} is about a river and a stone." for i in range(200)], load_tokenizer("tokenizer")
    )


def contexts(stream: np.ndarray, **changes: object) -> Contexts:
    return Contexts(stream, load_tokenizer("tokenizer"), Mixture(**changes), number=50, seed=3)  # type: ignore[arg-type]


def test_a_context_is_a_function_of_its_number(stream: np.ndarray) -> None:
    first, second = contexts(stream), contexts(stream)
    backwards = {i: second[i] for i in reversed(range(20))}
    for i in range(20):
        for key, value in first[i].items():
            assert torch.equal(value, backwards[i][key])
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


def test_contexts_are_full_and_documents_begin_with_the_end_token(stream: np.ndarray) -> None:
    for item in contexts(stream, context=96):
        ids, documents = item["input_ids"], item["document_ids"]
        assert all(len(value) == 96 for value in item.values())
        starts = torch.ones(96, dtype=torch.bool)
        starts[1:] = documents[1:] != documents[:-1]
        assert (ids[starts] == 0).all()
        assert (item["labels"][starts][1:] == -100).all()
        assert (documents[1:] - documents[:-1]).unique().tolist() in ([0], [0, 1])


def test_weights_tell_text_hay_and_answers(stream: np.ndarray) -> None:
    weights = torch.stack([item["loss_weights"] for item in contexts(stream, retrieval=1.0, short=0.0)])
    assert weights.unique().tolist() in ([pytest.approx(0.2), 10.0], [pytest.approx(0.2), 1.0, 10.0])
    assert (weights == 10.0).any(1).all()
    for item in contexts(stream, retrieval=0.0):
        assert (item["loss_weights"][1:][item["labels"][1:] != -100] == 1).all()


def test_made_up_haystacks_have_a_weight_of_their_own(stream: np.ndarray) -> None:
    made = contexts(stream, retrieval=1.0, short=0.0, filler_weight=0.0)
    weights = torch.stack([item["loss_weights"] for item in made])
    assert 0.0 in weights
    real = (weights == 0.0).sum(1) == 0
    assert 0.2 < real.float().mean() < 0.8  # half of the haystacks are real text


def test_haystacks_of_numbers_are_snippets_around_them(stream: np.ndarray) -> None:
    def digits(**settings: object) -> int:
        tokenizer = load_tokenizer("tokenizer")
        text = tokenizer.decode(torch.cat([i["input_ids"] for i in contexts(stream, retrieval=1.0, **settings)]))
        return sum(letter.isdigit() for letter in text)

    assert digits(numbers=1.0) > 1.1 * digits()
    words = encode_stream(["a river and a stone"] * 100, load_tokenizer("tokenizer"))
    with pytest.raises(UserError, match="there are none in the data set"):
        list(contexts(words, retrieval=1.0, numbers=1.0))


def test_questions_and_hard_haystacks_are_as_many_as_asked_for(stream: np.ndarray) -> None:
    def made(**changes: object) -> Contexts:
        return contexts(stream, context=300, retrieval=1.0, short=0.0, **changes)

    def answers(item: dict[str, torch.Tensor]) -> int:
        asked = item["loss_weights"] == 10.0
        return int((asked[1:] & ~asked[:-1]).sum())

    assert {answers(item) for item in made(questions=(1,))} == {1}
    assert {answers(item) for item in made(questions=(2, 3), novel=1.0)} == {2, 3}
    digits = {
        hard: sum(made(hard=hard).tokenizer.decode(item["input_ids"]).count("7") for item in made(hard=hard))
        for hard in (0.0, 0.5)
    }
    assert digits[0.5] > 1.2 * digits[0.0]


def test_too_little_data_gets_one_sentence(stream: np.ndarray) -> None:
    with pytest.raises(ValueError, match="the data set is empty"):
        encode_stream([], load_tokenizer("tokenizer"))
    with pytest.raises(ValueError, match="a context alone needs 129"):
        contexts(stream[:100])


TEXTS = [f"Text {n}: " + "a river runs. " * (n * 7 % 23) for n in range(40)]


def streamed(tmp_path: Path | None = None, context: int = 50, start: int = 0) -> StreamedContexts:
    contexts = StreamedContexts(
        lambda: iter(TEXTS), load_tokenizer("tokenizer"), context, None if tmp_path is None else tmp_path / "places"
    )
    contexts.start = start
    return contexts


def test_streamed_contexts_are_the_texts_in_a_row_over_and_over() -> None:
    tokenizer = load_tokenizer("tokenizer")
    row = encode_stream(TEXTS, tokenizer)
    found = list(islice(streamed(), 2 * len(row) // 50))
    ids = torch.cat([item["input_ids"] for item in found])
    assert torch.equal(ids, torch.from_numpy(np.tile(row, 2)[: len(ids)].astype(np.int64)))
    for item in found:
        begins = item["document_ids"].diff() != 0
        assert torch.equal(begins, item["input_ids"][1:] == tokenizer.eos_token_id)
        assert (item["labels"][1:][begins] == -100).all()
        assert (item["labels"][1:][~begins] == item["input_ids"][1:][~begins]).all()


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 100])
def test_streams_start_anywhere_by_the_places_they_kept(
    tmp_path: Path, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesattn.data.contexts.PLACES_EVERY", 8)
    whole = list(islice(streamed(tmp_path), 110))
    kept = (tmp_path / "places").read_text()
    assert len(kept.splitlines()) == 13
    again = list(islice(streamed(tmp_path, start=start), 110 - start))
    for item, same in zip(whole[start:], again, strict=True):
        assert torch.equal(item["input_ids"], same["input_ids"])
    assert (tmp_path / "places").read_text() == kept


def test_a_stream_of_nothing_gets_one_sentence() -> None:
    with pytest.raises(ValueError, match="the data set is empty"):
        next(iter(StreamedContexts(lambda: [], load_tokenizer("tokenizer"), 50)))
