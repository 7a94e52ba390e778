from __future__ import annotations

from random import Random

from bayesattn.data import facts
from bayesattn.data.facts import Fact
from bayesattn.data.wordings import WORDINGS, WordingSet


def test_values_and_invented_names_are_of_one_split() -> None:
    random = Random(0)
    seen: dict[WordingSet, set[str]] = {name: set() for name in WORDINGS}
    for name in seen:
        for _ in range(500):
            for fact in facts.draw_facts(random, name, 3):
                seen[name] |= {fact.entity, fact.value}
                assert (facts.value_split(fact.value) == "train") == (name == "train")
    assert not seen["train"] & (seen["validation"] | seen["fresh"])


def test_facts_differ_in_entity_or_attribute() -> None:
    random = Random(1)
    for _ in range(200):
        drawn = facts.draw_facts(random, "train", 5)
        assert len({(fact.entity, fact.attribute) for fact in drawn}) == 5


def test_a_question_has_one_answer() -> None:
    random = Random(2)
    anna, leo = Fact("Anna", "code", "123"), Fact("Leo", "code", "456")
    for _ in range(200):
        assert "Anna" in facts.ask(anna, [anna, leo], random, "train")


def test_sentences_have_the_value_and_no_open_pattern() -> None:
    random = Random(4)
    for name in WORDINGS:
        for _ in range(500):
            fact = facts.draw_facts(random, name, 1)[0]
            statement, question = facts.state(fact, random, name), facts.ask(fact, [fact], random, name)
            assert not set("{}[]|") & set(statement + question), statement + question
            assert fact.value in statement


def test_novel_facts_have_different_names_and_values_of_training() -> None:
    random = Random(0)
    for _ in range(100):
        drawn = facts.novel_facts(random, 4)
        names = {(*sorted(fact.entity.lower().split()), "", *sorted(fact.attribute.split())) for fact in drawn}
        assert len(names) == 4
        assert all(facts.value_split(fact.value) == "train" for fact in drawn)
