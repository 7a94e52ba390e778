from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from bayesattn.data.contexts import Contexts, StreamedContexts, encode_stream
from bayesattn.data.facts import draw_value
from bayesattn.data.mixture import Mixture
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
    weights = torch.stack([item["loss_weights"] for item in contexts(stream, retrieval_share=1.0, short_share=0.0)])
    assert weights.unique().tolist() in ([pytest.approx(0.2), 10.0], [pytest.approx(0.2), 1.0, 10.0])
    assert (weights == 10.0).any(1).all()
    for item in contexts(stream, retrieval_share=0.0):
        assert (item["loss_weights"][1:][item["labels"][1:] != -100] == 1).all()


def test_made_up_haystacks_have_a_weight_of_their_own(stream: np.ndarray) -> None:
    made = contexts(stream, retrieval_share=1.0, short_share=0.0, filler_weight=0.0)
    weights = torch.stack([item["loss_weights"] for item in made])
    assert 0.0 in weights
    real = (weights == 0.0).sum(1) == 0
    assert 0.2 < real.float().mean() < 0.8  # half of the haystacks are real text


def test_haystacks_of_numbers_are_snippets_around_them(stream: np.ndarray) -> None:
    def digits(**settings: object) -> int:
        tokenizer = load_tokenizer("tokenizer")
        text = tokenizer.decode(torch.cat([i["input_ids"] for i in contexts(stream, retrieval_share=1.0, **settings)]))
        return sum(letter.isdigit() for letter in text)

    assert digits(numbers_share=1.0) > 1.1 * digits()


def test_haystacks_of_numbers_need_numbers() -> None:
    words = encode_stream(["a river and a stone"] * 100, load_tokenizer("tokenizer"))
    with pytest.raises(UserError, match=r"numbers_share is 1\.0; the data set has no numbers, so 0 is needed"):
        list(contexts(words, retrieval_share=1.0, numbers_share=1.0))


def test_questions_and_hard_haystacks_are_as_many_as_asked_for(stream: np.ndarray) -> None:
    def made(**changes: object) -> Contexts:
        return contexts(stream, context=300, retrieval_share=1.0, short_share=0.0, **changes)

    def answers(item: dict[str, torch.Tensor]) -> int:
        is_answer = item["loss_weights"] == 10.0
        return int((is_answer[1:] & ~is_answer[:-1]).sum())

    assert {answers(item) for item in made(questions=(1,))} == {1}
    assert {answers(item) for item in made(questions=(2, 3), novel_share=1.0)} == {2, 3}
    digits = {
        share: sum(load_tokenizer("tokenizer").decode(item["input_ids"]).count("7") for item in made(hard_share=share))
        for share in (0.0, 0.5)
    }
    assert digits[0.5] > 1.2 * digits[0.0]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UserError, match="the data set is empty; give it at least one document"):
        encode_stream([], load_tokenizer("tokenizer"))


def test_a_data_set_shorter_than_a_context_is_refused(stream: np.ndarray) -> None:
    with pytest.raises(UserError, match="the data set has 100 tokens; one context needs at least 129"):
        contexts(stream[:100])


@pytest.mark.parametrize("index", [-1, 50])
def test_a_context_that_there_is_not_is_refused(stream: np.ndarray, index: int) -> None:
    with pytest.raises(IndexError, match=f"context {index} is asked for; there are contexts 0 to 49"):
        contexts(stream)[index]


def test_retrieval_documents_end_with_the_end_token_and_models_learn_it(stream: np.ndarray) -> None:
    made = contexts(stream, retrieval_share=1.0, short_share=0.0)
    for item in made:
        assert item["input_ids"][-1] == item["labels"][-1] == 0
        assert item["loss_weights"][-1] == 1
        assert (item["loss_weights"][:-1] == 10).any()


def test_texts_that_leave_room_for_another_end_where_a_text_ends(stream: np.ndarray) -> None:
    tokenizer = load_tokenizer("tokenizer")
    ended = 0
    for item in contexts(stream, retrieval_share=0.0, short_share=1.0):
        ids, documents = item["input_ids"], item["document_ids"]
        for number in range(int(documents[-1])):  # the last one may have been cut
            text = tokenizer.decode(ids[documents == number])
            assert text.startswith("<|end|>")
            assert text.endswith("stone.<|end|>") or len(text) < 30
            ended += len(text) >= 30
    assert ended > 50


def test_one_training_value_in_five_has_two_digits_only() -> None:
    random = Random(0)
    values = [draw_value(random, "train", 7) for _ in range(2000)]
    assert 0.15 < np.mean([len(set(value)) <= 2 for value in values]) < 0.25
    assert np.mean([len(set(draw_value(random, "held-out", 7))) <= 2 for _ in range(500)]) < 0.02


TEXTS = [f"Text {n}: " + "a river runs. " * (n * 7 % 23) for n in range(40)]


def streamed(tmp_path: Path | None = None, context: int = 50, start: int = 0) -> StreamedContexts:
    contexts = StreamedContexts(
        lambda: iter(TEXTS),
        load_tokenizer("tokenizer"),
        context,
        None if tmp_path is None else tmp_path / "places",
        place_every=8,
    )
    contexts.start = start
    return contexts


def test_streamed_contexts_are_the_texts_with_their_end_tokens_over_and_over() -> None:
    tokenizer = load_tokenizer("tokenizer")
    row = [i for text in TEXTS for i in [0, *tokenizer.encode(text, add_special_tokens=False), 0]]
    items = list(islice(streamed(), 2 * len(row) // 50))
    ids = torch.cat([item["input_ids"] for item in items])
    assert torch.equal(ids, torch.tensor([*row, *row])[: len(ids)])
    for item in items:
        begins = item["document_ids"].diff() != 0
        is_end = item["input_ids"] == tokenizer.eos_token_id
        assert torch.equal(begins, is_end[1:] & is_end[:-1])
        assert (item["labels"][1:][begins] == -100).all()
        assert (item["labels"][1:][~begins] == item["input_ids"][1:][~begins]).all()


def test_streamed_texts_have_no_first_token_if_the_tokenizer_has_none() -> None:
    tokenizer = load_tokenizer("tokenizer")
    tokenizer.bos_token = None
    row = [i for text in TEXTS for i in [*tokenizer.encode(text, add_special_tokens=False), 0]]
    item = next(iter(StreamedContexts(lambda: iter(TEXTS), tokenizer, 300)))
    assert item["input_ids"].tolist() == row[:300]


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 100])
def test_streams_start_anywhere_by_the_places_they_kept(tmp_path: Path, start: int) -> None:
    whole = list(islice(streamed(tmp_path), 110))
    kept = (tmp_path / "places").read_text()
    assert len(kept.splitlines()) == 13
    again = list(islice(streamed(tmp_path, start=start), 110 - start))
    for item, same in zip(whole[start:], again, strict=True):
        assert torch.equal(item["input_ids"], same["input_ids"])
    assert (tmp_path / "places").read_text() == kept


def test_a_stream_without_texts_is_refused() -> None:
    with pytest.raises(UserError, match="the data set is empty"):
        next(iter(StreamedContexts(lambda: [], load_tokenizer("tokenizer"), 50)))
