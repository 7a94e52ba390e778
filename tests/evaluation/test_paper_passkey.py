"""The paper's pass-key protocol: what its prompts are made of, and what counts as right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bayesattn.errors import UserError
from bayesattn.evaluation.paper_passkey import PAPER_INTRO, PaperTask
from bayesattn.evaluation.passkey import FILLER, NEEDLE, QUESTION
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import Prompt, evaluate
from tests.evaluation.test_passkey import oracle


def test_a_prompt_has_whole_fillers_around_one_needle_and_no_start_token() -> None:
    reader = oracle()
    make = PaperTask().prompts(reader)
    filler = reader.ids(" " + FILLER)
    for length in (110, 128, 1000, 5003):
        prompts = [make(Random(sample), length, sample / 19) for sample in range(20)]
        assert len({len(prompt.ids) for prompt in prompts}) == 1
        assert length - len(filler) < len(prompts[0].ids) <= length
        for sample, prompt in enumerate(prompts):
            (key,) = prompt.answers
            assert 10_000 <= int(key) <= 99_999
            before, between, after = reader.tokenizer.decode(prompt.ids).partition(" " + NEEDLE.format(key=key))
            assert between
            counts = before.count(FILLER), after.count(FILLER)
            assert counts[0] == sum(counts) * sample // 19
            assert before == PAPER_INTRO + f" {FILLER}" * counts[0]
            assert after == f" {FILLER}" * counts[1] + f" {QUESTION}"
            assert prompt.depth == (counts[0] / sum(counts) if sum(counts) else 0)
            assert prompt.ids[0] != reader.tokenizer.bos_token_id


def test_keys_are_uniform_those_of_training_among_them() -> None:
    make = PaperTask().prompts(oracle())
    keys = [int(make(Random(f"{trial}"), 200, 0.0).answers[0]) for trial in range(2000)]
    first_digits = [sum(key // 10_000 == digit for key in keys) for digit in range(1, 10)]
    assert min(first_digits) > 160  # 222 are expected, with a standard deviation of 14


class AlwaysRight(PaperTask):
    def scores(self, reader: Any, prompts: Sequence[Prompt]) -> list[float]:
        return [1.0] * len(prompts)


def test_samples_have_even_depths_in_turn() -> None:
    *_, cell = evaluate(oracle(), AlwaysRight(), [3000], 40, depths=20)
    depths = [depth for depth, _ in cell.outcomes]
    assert depths[:20] == depths[20:] == sorted(depths[:20])
    assert (depths[0], depths[19]) == (0, 1)
    assert len(set(depths)) == 20


class Copy(torch.nn.Module):
    """Predicts the digits of the key in the prompt, with one of them wrong if `wrong` says which."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, wrong: int | None = None) -> None:
        super().__init__()
        self.tokenizer, self.wrong, self.calls = tokenizer, wrong, 0

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> Any:
        self.calls += 1
        ids = input_ids[0].tolist()
        logits = torch.zeros(1, len(ids), len(self.tokenizer))
        for position, following in enumerate(ids[1:]):
            logits[0, position, following] = 1
        if self.wrong is not None:
            logits[0, len(ids) - 6 + self.wrong] = 0  # the position before that digit
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.mark.parametrize(("wrong", "right"), [(None, 1.0), (-1, 1.0), (0, 0.0), (2, 0.0), (4, 0.0)])
def test_five_digits_are_scored_in_one_pass_and_the_space_is_given(wrong: int | None, right: float) -> None:
    tokenizer = oracle().tokenizer
    model = Copy(tokenizer, wrong)
    reader = Reader("copy", model, tokenizer, 128)
    assert PaperTask().scores(reader, [Prompt(reader.ids("The pass key is"), ("48213",))]) == [right]
    assert model.calls == 1


class Sentencepiece:
    """A tokenizer that puts a space before each text by itself, as the paper's does; a token is a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in f"▁{text}".replace(" ", "▁")]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids)).replace("▁", " ")


def test_a_tokenizer_that_adds_spaces_itself_gets_the_pieces_as_they_are() -> None:
    reader = Reader("spaces", None, Sentencepiece(), 128)
    prompt = PaperTask().prompts(reader)(Random(0), 1000, 0.0)
    assert reader.tokenizer.decode(prompt.ids).startswith(f" {PAPER_INTRO} The pass key is {prompt.answers[0]}. Re")


def test_a_length_without_room_gets_one_sentence() -> None:
    make: Callable[..., Prompt] = PaperTask().prompts(oracle())
    with pytest.raises(UserError, match=r"a prompt of 64 tokens has no room for its needle; at least \d+ are needed"):
        make(Random(0), 64, None)


def test_bam_tiny_passes_the_protocol() -> None:
    *_, cell = evaluate(load_reader("bam-tiny"), PaperTask(), [512], 20, depths=20)
    assert cell.right >= 18
