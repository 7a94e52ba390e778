from __future__ import annotations

import re
from dataclasses import fields
from itertools import combinations
from random import Random

import pytest

from bayesattn.data import retrieval
from bayesattn.data.contexts import Contexts, Mixture, encode_stream
from bayesattn.data.text import Split, bundled
from bayesattn.data.tokenizer import load_tokenizer

TRAIN, HELD_OUT = retrieval.WORDINGS["train"], retrieval.WORDINGS["held-out"]


def spelled_out(pattern: str) -> set[str]:
    """Every choice of the alternatives in brackets."""
    inner = re.search(r"\[([^\[\]]*)\]", pattern)
    if inner is None:
        return {pattern}
    choices = (pattern[: inner.start()] + choice + pattern[inner.end() :] for choice in inner.group(1).split("|"))
    return {text for choice in choices for text in spelled_out(choice)}


@pytest.mark.parametrize("kind", [field.name for field in fields(retrieval.Wording)])
@pytest.mark.parametrize("pair", list(combinations(retrieval.WORDINGS, 2)))
def test_the_wordings_share_nothing(kind: str, pair: tuple[retrieval.Worded, retrieval.Worded]) -> None:
    one, other = (
        {text for pattern in getattr(retrieval.WORDINGS[worded], kind) for text in spelled_out(pattern)}
        for worded in pair
    )
    common = one & other
    # Some facts are stated without any opening, and end with a full stop, in all.
    assert common <= ({""} if kind == "openings" else {"."} if kind == "endings" else set())


def test_values_and_made_up_names_are_of_one_split() -> None:
    random = Random(0)
    seen: dict[retrieval.Worded, set[str]] = {worded: set() for worded in retrieval.WORDINGS}
    for worded in seen:
        for _ in range(500):
            for fact in retrieval.draw_facts(random, worded, 3):
                seen[worded] |= {fact.entity, fact.value}
                assert (retrieval.value_split(fact.value) == "train") == (worded == "train")
    assert not seen["train"] & (seen["held-out"] | seen["fresh"])


def test_held_out_keys_are_nowhere_in_training_contexts() -> None:
    """Of five digits, as keys are; the text's own numbers aside."""
    tokenizer, text = load_tokenizer("tokenizer"), " ".join(bundled("train"))
    mixture = Mixture(context=128, retrieval=1.0, hard=0.5, numbers=0.5, novel=0.5, early=0.5)
    contexts = Contexts(encode_stream(iter(bundled("train")), tokenizer), tokenizer, mixture, number=300, seed=0)
    written = " ".join(tokenizer.decode(contexts[number]["input_ids"]) for number in range(300))
    found = [number for number in re.findall(r"(?<!\d)\d{5}(?!\d)", written) if number not in text]
    assert len(found) > 100
    assert all(retrieval.value_split(number) == "train" for number in found)


def test_the_pass_key_prompt_is_nowhere_in_the_training_data() -> None:
    training = " ".join([*bundled("train"), *(p for f in fields(TRAIN) for p in getattr(TRAIN, f.name))]).lower()
    assert "pass key" not in training
    for sentence in re.findall(r"[^.]+\.", retrieval.PASSKEY_INTRO + " " + retrieval.PASSKEY_FILLER):
        assert sentence.strip().lower() not in training


def test_facts_differ_in_entity_or_attribute() -> None:
    random = Random(1)
    for _ in range(200):
        facts = retrieval.draw_facts(random, "train", 5)
        assert len({(fact.entity, fact.attribute) for fact in facts}) == 5


def test_a_question_has_one_answer() -> None:
    random = Random(2)
    a, b = retrieval.Fact("Anna", "code", "123"), retrieval.Fact("Leo", "code", "456")
    for _ in range(200):
        assert "Anna" in retrieval.ask(a, [a, b], random, "train")


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_a_document_holds_the_facts_it_asks_about(split: Split) -> None:
    tokenizer = load_tokenizer("tokenizer")
    random = Random(3)
    hay = retrieval.Piece(tokenizer.encode(" the quiet river" * 100))
    for length in (64, 127, 200):
        for _ in range(40):
            pieces = retrieval.document(tokenizer, random, hay, length, split)
            assert sum(len(piece.ids) for piece in pieces) <= length
            answers = [n for n, piece in enumerate(pieces) if piece.kind == "answer"]
            assert answers or length == 64
            if not answers:
                continue
            before = tokenizer.decode([i for piece in pieces[: answers[0]] for i in piece.ids])
            assert tokenizer.decode(pieces[answers[0]].ids).rstrip(".") in before


def test_a_space_is_of_the_question_or_of_the_answer_and_the_text_is_the_same() -> None:
    tokenizer = load_tokenizer("tokenizer")
    hay = retrieval.Piece(tokenizer.encode(" the quiet river" * 100))
    for seed in range(20):
        before, after = (
            retrieval.document(tokenizer, Random(seed), hay, 120, "train", novel=0.5, spaced=spaced)
            for spaced in (False, True)
        )
        assert [i for piece in before for i in piece.ids] == [i for piece in after for i in piece.ids]
        longer = [len(new.ids) - len(old.ids) for old, new in zip(before, after, strict=True) if old.kind == "answer"]
        assert set(longer) == {1}


def test_patterns_leave_nothing_open() -> None:
    random = Random(4)
    for split in retrieval.WORDINGS:
        for _ in range(500):
            fact = retrieval.draw_facts(random, split, 1)[0]
            text = retrieval.state(fact, random, split) + retrieval.ask(fact, [fact], random, split)
            assert not set("{}[]|") & set(text), text
            assert fact.value in text


def test_novel_facts_are_of_training_alone_and_asked_unmistakably() -> None:
    tokenizer, random = load_tokenizer("tokenizer"), Random(0)
    held_out = {word for text in (*HELD_OUT.attributes, *HELD_OUT.entities) for word in text.lower().split()} - {"the"}
    assert len(retrieval.lexicon()) > 5000
    assert not held_out & set(retrieval.lexicon())
    seen = {word for text in (*TRAIN.attributes, *TRAIN.entities) for word in text.lower().split()}
    assert not (held_out - seen) & set(retrieval.running_words())
    fresh = retrieval.WORDINGS["fresh"]
    named = {word for text in (*fresh.attributes, *fresh.entities) for word in text.lower().split()}
    assert not (named - seen) & set(retrieval.lexicon())
    for _ in range(100):
        facts = retrieval.novel_facts(random, 4)
        names = {(*sorted(fact.entity.lower().split()), "", *sorted(fact.attribute.split())) for fact in facts}
        assert len(names) == 4
        assert all(retrieval.value_split(fact.value) == "train" for fact in facts)
        for question in (True, False):
            wording = retrieval.novel_wording(random, question)
            assert 1 <= wording.count("{e}") <= (2 if question else 1)
            assert 1 <= wording.count("{a}") <= (2 if question else 1)
            assert 1 - question <= wording.count("{v}") <= 2 * (1 - question)
        hay = retrieval.Piece(tokenizer.encode("A river. " * 40), "filler")
        pieces = retrieval.document(tokenizer, random, hay, 120, "train", novel=1.0)
        text = tokenizer.decode([token for piece in pieces for token in piece.ids])
        for piece in pieces:
            if piece.kind == "answer":
                assert text.count(tokenizer.decode(piece.ids).rstrip(".")) >= 2


def test_values_are_told_early_as_often_as_asked_for() -> None:
    random = Random(5)
    for early, share in {0.0: 0.0, 0.5: 0.5, 1.0: 1.0}.items():
        told = [retrieval.novel_wording(random, question=False, early=early) for _ in range(400)]
        first = [text.index("{v}") < max(text.index("{e}"), text.index("{a}")) for text in told]
        assert sum(first) / len(first) == pytest.approx(share, abs=0.1)


def test_swapped_words_are_of_no_held_out_wording_and_leave_the_fact_alone() -> None:
    random, pattern = Random(0), "When you need the {a} of {e}, {e}'s {a} = {v} (or it is {v})."
    assert retrieval.swapped(pattern, random, 0.0) == pattern
    texts = [retrieval.swapped(pattern, random, 1.0) for _ in range(400)]
    shape = re.compile(r"\w+ \w+ \w+ \w+ {a} \w+ {e}, {e}'s {a} = {v} \(\w+ \w+ \w+ {v}\)\.")
    assert all(shape.fullmatch(text) for text in texts)
    words = [word for text in texts for word in re.findall(r"[A-Za-z]{2,}", text)]
    own = {"When", "you", "need", "the", "of", "or", "it", "is"}
    assert 0.45 < sum(word in own for word in words) / len(words) < 0.55
    swapped = sum(retrieval.swapped(pattern, random, 0.5) != pattern for _ in range(400))
    assert 160 < swapped < 240
    assert {"reads", "assigned", "listed"} <= set(retrieval.lexicon())
    assert not {"reads", "assigned", "listed"} & set(retrieval.other_words())
    assert {"have", "found", "give"} <= set(retrieval.other_words())


def test_a_document_may_ask_nothing_and_its_text_counts_as_text() -> None:
    tokenizer, random = load_tokenizer("tokenizer"), Random(0)
    hay = retrieval.Piece(tokenizer.encode(" the quiet river" * 100))
    for kind, counted in (("text", "unasked"), ("filler", "filler")):
        pieces = retrieval.document(
            tokenizer, random, retrieval.Piece(hay.ids, kind), 120, "train", facts=(2,), questions=(0,)
        )
        assert {piece.kind for piece in pieces} == {counted, "text"}
        assert sum(len(piece.ids) for piece in pieces) == 120
    assert retrieval.document(tokenizer, random, hay, 5, "train", facts=(3,), questions=(0,)) == []
