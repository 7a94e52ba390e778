from __future__ import annotations

import re
from dataclasses import fields
from itertools import combinations
from random import Random

import pytest

from bayesattn.data import wordings
from bayesattn.data.text import bundled
from bayesattn.data.wordings import WORDINGS, WordingSet
from bayesattn.evaluation import passkey


def all_choices(pattern: str) -> set[str]:
    """The pattern with every choice of its alternatives."""
    inner = re.search(r"\[([^\[\]]*)\]", pattern)
    if inner is None:
        return {pattern}
    choices = (pattern[: inner.start()] + choice + pattern[inner.end() :] for choice in inner.group(1).split("|"))
    return {text for choice in choices for text in all_choices(choice)}


def words_of_names(wording_set: WordingSet) -> set[str]:
    wording = WORDINGS[wording_set]
    return {word for text in (*wording.attributes, *wording.entities) for word in text.lower().split()} - {"the"}


@pytest.mark.parametrize("kind", [field.name for field in fields(wordings.Wording)])
@pytest.mark.parametrize("pair", list(combinations(WORDINGS, 2)))
def test_wording_sets_share_nothing(kind: str, pair: tuple[WordingSet, WordingSet]) -> None:
    one, other = ({text for pattern in getattr(WORDINGS[name], kind) for text in all_choices(pattern)} for name in pair)
    common = one & other
    # In all sets, some facts have no opening, and end with a full stop.
    assert common <= ({""} if kind == "openings" else {"."} if kind == "endings" else set())


def test_seeds_of_published_results_stay_the_same() -> None:
    assert {name: wordings.seed_key(name) for name in WORDINGS} == {
        "train": "train",
        "validation": "held-out",
        "fresh": "fresh",
    }


def test_the_pass_key_prompt_is_nowhere_in_the_training_data() -> None:
    train = WORDINGS["train"]
    training = " ".join([*bundled("train"), *(p for f in fields(train) for p in getattr(train, f.name))]).lower()
    assert "pass key" not in training
    sentences = re.findall(r"[^.]+\.", passkey.INTRO + " " + passkey.FILLER)
    assert len(sentences) == 8
    for sentence in sentences:
        assert sentence.strip().lower() not in training


def test_random_words_of_training_are_in_no_name_of_evaluation() -> None:
    train, validation, fresh = (words_of_names(name) for name in WORDINGS)
    assert len(wordings.lexicon()) > 5000
    assert not validation & set(wordings.lexicon())
    assert not (validation - train) & set(wordings.running_words())
    assert not (fresh - train) & set(wordings.lexicon())


def test_swapped_words_are_of_no_validation_pattern() -> None:
    assert {"reads", "assigned", "listed"} <= set(wordings.lexicon())
    assert not {"reads", "assigned", "listed"} & set(wordings.other_words())
    assert {"have", "found", "give"} <= set(wordings.other_words())


def test_swapping_replaces_half_of_the_words_and_leaves_the_fact_alone() -> None:
    random, pattern = Random(0), "When you need the {a} of {e}, {e}'s {a} = {v} (or it is {v})."
    assert wordings.swap_words(pattern, random, 0.0) == pattern
    texts = [wordings.swap_words(pattern, random, 1.0) for _ in range(400)]
    shape = re.compile(r"\w+ \w+ \w+ \w+ {a} \w+ {e}, {e}'s {a} = {v} \(\w+ \w+ \w+ {v}\)\.")
    assert all(shape.fullmatch(text) for text in texts)
    words = [word for text in texts for word in re.findall(r"[A-Za-z]{2,}", text)]
    own = {"When", "you", "need", "the", "of", "or", "it", "is"}
    assert 0.45 < sum(word in own for word in words) / len(words) < 0.55
    changed = sum(wordings.swap_words(pattern, random, 0.5) != pattern for _ in range(400))
    assert 160 < changed < 240


@pytest.mark.parametrize("early_share", [0.0, 0.5, 1.0])
def test_novel_statements_give_the_value_early_in_this_share(early_share: float) -> None:
    random = Random(5)
    statements = [wordings.novel_statement(random, early_share) for _ in range(400)]
    early = [text.index("{v}") < max(text.index("{e}"), text.index("{a}")) for text in statements]
    assert sum(early) / len(early) == pytest.approx(early_share, abs=0.1)


def test_novel_patterns_name_the_fact_and_only_statements_have_its_value() -> None:
    random = Random(0)
    for _ in range(100):
        statement, question = wordings.novel_statement(random), wordings.novel_question(random)
        assert statement.count("{e}") == statement.count("{a}") == 1
        assert 1 <= statement.count("{v}") <= 2
        assert 1 <= question.count("{e}") <= 2
        assert 1 <= question.count("{a}") <= 2
        assert "{v}" not in question
