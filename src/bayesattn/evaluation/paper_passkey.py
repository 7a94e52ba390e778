"""The BAM paper's pass-key protocol: its prompts, keys, depths and scoring, with our pass-key sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch

from bayesattn.errors import UserError
from bayesattn.evaluation.passkey import BLAND, FILLER, INTRO, NEEDLE, QUESTION, check_keys
from bayesattn.evaluation.reader import Reader
from bayesattn.evaluation.trials import MakePrompt, Prompt

# The paper's introduction speaks of several things.
PAPER_INTRO = INTRO.replace("memorize it", "memorize them")
# Evenly spaced depths, one for each sample.
DEPTHS = 20
LEAST_KEY, LARGEST_KEY = 10_000, 99_999


@dataclass(frozen=True)
class PaperTask:
    """Pass keys as the BAM paper's evaluation asks for them.

    A prompt is the introduction, k fillers, the needle, n − k fillers, and the question. Each piece is tokenized on its
    own, and there is no start token. n is the largest number of whole fillers for which the prompt has at most the
    tokens that are wanted, so that it is shorter than these by less than a filler. Keys are uniform in 10000 … 99999,
    those of training among them. Sample t of 20 has k = ⌊n·t/19⌋.

    The model reads prompt and answer once. The space before the key is given; an answer is right if each digit is the
    most likely token after the true ones before it.
    """

    digits: ClassVar[int] = 5
    seed_key: ClassVar[str] = "paper"
    answer_tokens: ClassVar[int] = 8
    counts_answer: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        return {
            "protocol": "paper",
            "wording": "standard",
            "haystack": BLAND,
            "digits": self.digits,
            "teacher_forced": True,
        }

    def prompts(self, reader: Reader) -> MakePrompt:
        check_keys(reader, self.digits)
        intro, filler = reader.ids(PAPER_INTRO), _piece(reader, FILLER)
        question = _piece(reader, QUESTION)
        without = len(intro) + len(_piece(reader, NEEDLE.format(key=LARGEST_KEY))) + len(question)

        def make(random: Random, length: int, depth: float | None) -> Prompt:
            if length < without:
                raise UserError(
                    f"a prompt of {length} tokens has no room for its needle; at least {without} are needed"
                )
            n = (length - without) // len(filler)
            sample = random.randrange(DEPTHS) if depth is None else round(depth * (DEPTHS - 1))
            before = n * sample // (DEPTHS - 1)
            key = str(random.randint(LEAST_KEY, LARGEST_KEY))
            needle = _piece(reader, NEEDLE.format(key=key))
            ids = [*intro, *filler * before, *needle, *filler * (n - before), *question]
            return Prompt(ids, (key,), before / n if n else 0.0)

        return make

    def scores(self, reader: Reader, prompts: Sequence[Prompt]) -> list[float]:
        """1 if all digits are predicted, else 0."""
        return [float(_predicts_digits(reader, prompt)) for prompt in prompts]


def _piece(reader: Reader, text: str) -> list[int]:
    """Tokens of a piece after another one, with a space before it unless the tokenizer puts one there by itself."""
    adds_space = str(reader.tokenizer.convert_ids_to_tokens(reader.ids("The")[:1])[0]).startswith("▁")
    return reader.ids(text if adds_space else f" {text}")


def _predicts_digits(reader: Reader, prompt: Prompt) -> bool:
    answer = reader.ids(" " + prompt.answers[0])
    given = next(number for number, token in enumerate(answer) if reader.tokenizer.decode([token]).strip())
    digits = answer[given:]
    ids = torch.tensor([[*prompt.ids, *answer]], device=reader.model.device)
    predicted: list[int] = reader.last_logits(ids, len(digits) + 1)[0, :-1].argmax(-1).tolist()
    return predicted == digits
