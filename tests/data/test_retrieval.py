from __future__ import annotations

import re
from random import Random

import pytest

from bayesattn.data import retrieval
from bayesattn.data.contexts import Contexts, encode_stream
from bayesattn.data.facts import value_split
from bayesattn.data.mixture import Mixture
from bayesattn.data.retrieval import Piece
from bayesattn.data.text import bundled
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.data.wordings import WordingSet

TOKENIZER = load_tokenizer("tokenizer")
HAY = Piece(TOKENIZER.encode(" the quiet river" * 100))


def test_held_out_keys_are_nowhere_in_training_contexts() -> None:
    """Of five digits, as keys are; the text's own numbers aside."""
    text = " ".join(bundled("train"))
    mixture = Mixture(retrieval_share=1.0, hard_share=0.5, numbers_share=0.5, novel_share=0.5, early_share=0.5)
    contexts = Contexts(encode_stream(iter(bundled("train")), TOKENIZER), TOKENIZER, mixture, number=300, seed=0)
    written = " ".join(TOKENIZER.decode(contexts[number]["input_ids"]) for number in range(300))
    numbers = [number for number in re.findall(r"(?<!\d)\d{5}(?!\d)", written) if number not in text]
    assert len(numbers) > 100
    assert all(value_split(number) == "train" for number in numbers)


@pytest.mark.parametrize("wording_set", ["train", "validation"])
def test_a_document_holds_the_facts_it_asks_about(wording_set: WordingSet) -> None:
    random = Random(3)
    for length in (64, 127, 200):
        for _ in range(40):
            pieces = retrieval.document(TOKENIZER, random, HAY, length, wording_set, Mixture())
            assert sum(len(piece.ids) for piece in pieces) <= length
            answers = [n for n, piece in enumerate(pieces) if piece.kind == "answer"]
            assert answers or length == 64
            if not answers:
                continue
            before = TOKENIZER.decode([i for piece in pieces[: answers[0]] for i in piece.ids])
            assert TOKENIZER.decode(pieces[answers[0]].ids).rstrip(".") in before


def test_a_space_is_of_the_question_or_of_the_answer_and_the_text_is_the_same() -> None:
    for seed in range(20):
        before, after = (
            retrieval.document(TOKENIZER, Random(seed), HAY, 120, "train", Mixture(novel_share=0.5, spaced=spaced))
            for spaced in (False, True)
        )
        assert [i for piece in before for i in piece.ids] == [i for piece in after for i in piece.ids]
        longer = [len(new.ids) - len(old.ids) for old, new in zip(before, after, strict=True) if old.kind == "answer"]
        assert set(longer) == {1}


def test_novel_documents_hold_the_facts_they_ask_about() -> None:
    random, hay = Random(0), Piece(TOKENIZER.encode("A river. " * 40), "filler")
    for _ in range(100):
        pieces = retrieval.document(TOKENIZER, random, hay, 120, "train", Mixture(novel_share=1.0))
        text = TOKENIZER.decode([token for piece in pieces for token in piece.ids])
        answers = [TOKENIZER.decode(piece.ids).rstrip(".") for piece in pieces if piece.kind == "answer"]
        assert answers
        assert all(text.count(answer) >= 2 for answer in answers)


@pytest.mark.parametrize(("kind", "expected"), [("text", "no_question"), ("filler", "filler")])
def test_text_of_a_document_without_questions_counts_as_text(kind: str, expected: str) -> None:
    hay, mixture = Piece(HAY.ids, kind), Mixture(facts=(2,), questions=(0, 1))  # type: ignore[arg-type]
    documents = [retrieval.document(TOKENIZER, Random(seed), hay, 120, "train", mixture) for seed in range(20)]
    kinds = [{piece.kind for piece in pieces} for pieces in documents]
    assert {expected, "text"} in kinds
    assert {kind, "text", "answer"} in kinds
    assert all(sum(len(piece.ids) for piece in pieces) == 120 for pieces in documents)


def test_without_room_for_a_fact_there_is_no_document() -> None:
    assert retrieval.document(TOKENIZER, Random(0), HAY, 5, "train", Mixture(facts=(3,))) == []
