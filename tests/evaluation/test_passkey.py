from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bayesattn.data.contexts import encode_stream
from bayesattn.data.retrieval import value_split
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.evaluation import passkey


class Oracle:
    """Answers with the digits that follow the first ` is ` before a number, or with nonsense."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, wrong_every: int = 0) -> None:
        self.tokenizer, self.wrong_every, self.asked = tokenizer, wrong_every, 0

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        rows = []
        for row in ids:
            self.asked += 1
            text = self.tokenizer.decode(row)
            key = text.partition("The pass key is ")[2][:5]
            said = "00000 no" if self.wrong_every and self.asked % self.wrong_every == 0 else f"{key}. And"
            new = self.tokenizer.encode(" " + said)[:max_new_tokens]
            rows.append(torch.cat([row, torch.tensor(new + [1] * (max_new_tokens - len(new)))]))
        return torch.stack(rows)


@pytest.mark.parametrize("length", [110, 128, 1000])
def test_standard_prompts_have_the_length_and_the_key(length: int) -> None:
    tokenizer = load_tokenizer("tokenizer")
    make = passkey.standard(tokenizer)
    for trial in range(10):
        prompt = make(Random(trial), length)
        text = tokenizer.decode(prompt.ids)
        assert len(prompt.ids) == length
        assert text.count(prompt.answer) == 2
        assert text.endswith("What is the pass key? The pass key is")
        assert value_split(prompt.answer) == "held-out"
    with pytest.raises(ValueError, match=r"no room for its needle; at least \d+ are needed"):
        make(Random(0), 60)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_competing_prompts_state_what_they_ask(split: Any) -> None:
    tokenizer = load_tokenizer("tokenizer")
    stream = encode_stream(["A river. " * 50], tokenizer)
    make = passkey.competing(tokenizer, stream, split)
    for trial in range(20):
        prompt = make(Random(trial), 250)
        assert len(prompt.ids) == 250
        assert prompt.answer in tokenizer.decode(prompt.ids)
        assert value_split(prompt.answer) == "held-out"


def test_accuracy_counts_whole_answers() -> None:
    tokenizer = load_tokenizer("tokenizer")
    cell = passkey.measure(Oracle(tokenizer, wrong_every=4), tokenizer, passkey.standard(tokenizer), 150, 20)
    assert (cell.right, cell.trials) == (15, 20)
    assert str(cell) == "75% (15/20, 95% interval 53% … 89%)"
    again = passkey.measure(Oracle(tokenizer), tokenizer, passkey.standard(tokenizer), 150, 20)
    assert again.accuracy == 1


@pytest.mark.parametrize(
    ("said", "right"), [(" 123.", True), ("123", True), ("1234", False), ("12", False), ("It is 123", False)]
)
def test_an_answer_is_right_if_it_comes_first_and_ends(said: str, right: bool) -> None:
    assert passkey.is_right(said, "123") == right


def test_prompts_are_the_same_for_the_same_seed() -> None:
    tokenizer = load_tokenizer("tokenizer")
    seen: list[torch.Tensor] = []
    model = SimpleNamespace(
        device=torch.device("cpu"), generate=lambda ids, **_: seen.append(ids) or torch.nn.functional.pad(ids, (0, 8))
    )
    for _ in range(2):
        passkey.measure(model, tokenizer, passkey.standard(tokenizer), 128, 3, seed=7)
    assert torch.equal(seen[0], seen[1])
