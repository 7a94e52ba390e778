from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bayesattn.data.facts import Fact, value_split
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.evaluation import passkey
from bayesattn.evaluation.cells import Cell
from bayesattn.evaluation.passkey import NEEDLE, Task
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import evaluate, measure


class Oracle(torch.nn.Module):
    """Answers with the digits that follow the first `The pass key is`, or with nonsense."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, wrong_every: int = 0, reads: int = 10**9) -> None:
        super().__init__()
        self.tokenizer, self.wrong_every, self.reads, self.prompts = tokenizer, wrong_every, reads, 0

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        rows = []
        for row in ids:
            self.prompts += 1
            wrong = len(row) > self.reads or (self.wrong_every and self.prompts % self.wrong_every == 0)
            key = self.tokenizer.decode(row).partition("The pass key is ")[2][:5]
            new = self.tokenizer.encode(" 00000 no" if wrong else f" {key}. And")[:max_new_tokens]
            rows.append(torch.cat([row, torch.tensor(new + [1] * (max_new_tokens - len(new)))]))
        return torch.stack(rows)


class OracleReader(Reader):
    def bytes_needed(self, length: int) -> int:
        return length


def oracle(**settings: int) -> Reader:
    tokenizer = load_tokenizer("tokenizer")
    return OracleReader("oracle", Oracle(tokenizer, **settings), tokenizer, 128)


@pytest.mark.parametrize("haystack", ["", "hard", "text", __file__])
@pytest.mark.parametrize("length", [110, 128, 1000])
def test_standard_prompts_have_the_length_the_key_and_the_depth(length: int, haystack: str) -> None:
    reader = oracle()
    make = Task(haystack=haystack).prompts(reader)
    for trial in range(10):
        prompt = make(Random(trial), length, None)
        text = reader.tokenizer.decode(prompt.ids)
        assert len(prompt.ids) == length
        assert text.count(NEEDLE.format(key=prompt.answers[0])) == 1
        before, question, _ = text.rpartition(" What is the pass key? The pass key is")
        assert question
        assert before.endswith((".", "!", "?", "\n"))
        assert value_split(prompt.answers[0]) == "held-out"
        assert 0 <= prompt.depth <= 1
    start, end = (make(Random(0), length, depth) for depth in (0.0, 1.0))
    assert (start.depth, end.depth) == (0.0, 1.0)
    assert reader.tokenizer.decode(end.ids).endswith(
        f"{end.answers[0]} is the pass key. What is the pass key? The pass key is"
    )


@pytest.mark.parametrize(
    ("wording", "length", "sentence"),
    [
        ("standard", 60, r"a prompt of 60 tokens has no room for its needle; at least \d+ are needed"),
        ("train", 20, "a prompt of 20 tokens has no room for 3 facts and a question; more are needed"),
    ],
)
def test_prompts_without_room_get_one_sentence(wording: Any, length: int, sentence: str) -> None:
    make = Task(wording).prompts(oracle())
    with pytest.raises(UserError, match=sentence):
        make(Random(0), length, None)


@pytest.mark.parametrize("haystack", ["text", "hard"])
@pytest.mark.parametrize("wording", ["train", "validation", "fresh"])
def test_competing_prompts_state_what_they_ask(wording: Any, haystack: str) -> None:
    reader = oracle()
    make = Task(wording, haystack, digits=9).prompts(reader)
    for trial in range(20):
        prompt = make(Random(trial), 400, 0.5)
        assert len(prompt.ids) == 400
        assert prompt.answers[0] in reader.tokenizer.decode(prompt.ids)
        assert value_split(prompt.answers[0]) == "held-out"
        assert abs(prompt.depth - 0.5) < 0.1  # between two sentences if one ends nearby


def test_accuracy_counts_whole_answers() -> None:
    cell = measure(oracle(wrong_every=4), Task(), 150, 20)
    assert (cell.right, cell.trials) == (15, 20)
    assert str(cell) == "75% (15/20, 95% interval 53% … 89%)"
    assert measure(oracle(), Task(), 150, 20).accuracy == 1
    assert str(Cell(5)) == "not tried"


@pytest.mark.parametrize(
    ("text", "right"), [(" 123.", True), ("123", True), ("1234", False), ("12", False), ("It is 123", False)]
)
def test_an_answer_is_right_if_it_comes_first_and_ends(text: str, right: bool) -> None:
    assert passkey.is_right(text, "123") == right


def test_competing_keys_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 125 held-out keys of three digits, twelve drawn at random would often have two alike."""
    facts: list[Fact] = []

    def state(fact: Fact, *settings: Any) -> str:
        facts.append(fact)
        return f"{fact.entity} {fact.attribute} {fact.value}."

    monkeypatch.setattr(passkey, "state", state)
    haystack = tmp_path / "hay.txt"
    haystack.write_text("It rained all day. " * 50)
    reader = oracle()
    make = Task("train", str(haystack), needles=(12, 12), digits=3).prompts(reader)
    for trial in range(20):
        facts.clear()
        prompt = make(Random(trial), 600, None)
        keys = [fact.value for fact in facts[-12:]]
        assert len(set(keys)) == 12
        assert prompt.answers[0] in keys
        text = reader.tokenizer.decode(prompt.ids)
        assert all(len(re.findall(rf"(?<!\d){key}(?!\d)", text)) == 1 for key in keys)


def test_depths_are_taken_in_turn() -> None:
    *_, cell = evaluate(oracle(), Task(), [1000], 6, depths=3)
    assert [round(depth, 2) for depth, _ in cell.outcomes] == [0, 0.5, 1, 0, 0.5, 1]


def test_a_model_that_fails_is_stopped_and_longer_lengths_are_not_tried() -> None:
    reader = oracle(reads=600)
    cells = {cell.length: cell for cell in evaluate(reader, Task(), [4096, 256, 1024, 2048], 50)}
    assert list(cells) == [256, 1024, 2048, 4096]
    assert (cells[256].right, cells[256].trials) == (50, 50)
    assert (cells[1024].right, cells[1024].trials, cells[1024].note) == (0, 32, "stopped: none of 32 right")
    assert cells[2048].note == cells[4096].note == "not tried: none right at 1,024"
    *_, cell = evaluate(reader, Task(), [1024, 2048], {1024: 30, 2048: 40}, stop=False)
    assert (cell.trials, cell.note) == (40, "")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"wording": "odd"}, "the wording is 'odd'; allowed are standard, train, validation, fresh$"),
        ({"wording": "held-out"}, "the wording is 'held-out'; .*; held-out is now called validation$"),
        ({"needles": (3, 2)}, "3 to 2 keys are asked for; 1 to 20 are allowed"),
        ({"digits": 2}, "keys of 2 digits are asked for; 3 to 50 are allowed"),
        ({"haystack": "nowhere.txt"}, "the haystack is 'nowhere.txt'; bland, hard, text or a text file is needed"),
    ],
)
def test_tasks_that_make_no_sense_get_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Task(**settings).prompts(oracle())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"too short", r"hay\.txt has \d+ tokens; a haystack needs at least 100"),
        (bytes(range(128, 256)), r"hay\.txt is not text in UTF-8"),
    ],
)
def test_haystacks_that_are_no_text_get_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "hay.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        Task(haystack=str(file)).prompts(oracle())


@pytest.mark.parametrize(
    ("wording", "key"),
    [("standard", "standard"), ("train", "train"), ("validation", "held-out"), ("fresh", "fresh")],
)
def test_prompts_of_published_results_stay_the_same(wording: Any, key: str) -> None:
    assert Task(wording).seed_key == key


def test_a_model_with_few_positions_has_room_for_its_answer() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=1024, n_positions=128)
    reader = Reader("gpt2", GPT2LMHeadModel(config).eval(), load_tokenizer("tokenizer"), 128)
    *_, whole, beyond = evaluate(reader, Task(), [128, 256], 2, stop=False)
    assert (whole.length, whole.trials, whole.right) == (128, 2, 0)
    assert beyond.note == "not tried: the model has positions for 128 tokens"
    with torch.device("meta"):  # what it could not read for want of positions need not fit into memory
        large = Reader("gpt2", GPT2LMHeadModel(GPT2Config()), load_tokenizer("tokenizer"), 1024)
    (cell,) = evaluate(large, Task(), [2_000_000], 1)
    assert cell.note == "not tried: the model has positions for 1,024 tokens"


def test_greedy_is_greedy_whatever_a_model_says_of_generation() -> None:
    reader = load_reader("bam-tiny")
    reader.model.generation_config.repetition_penalty = 100.0
    reader.model.generation_config.num_beams = 3
    assert measure(reader, Task(), 256, 4).right == 4
