from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bayesattn.data.text import bundled
from bayesattn.data.tokenizer import load_tokenizer, train_tokenizer

SHIPPED = load_tokenizer("tokenizer")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_can_be_encoded_and_comes_back(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_of_its_own() -> None:
    assert SHIPPED.convert_ids_to_tokens(SHIPPED.encode("a1234 56", add_special_tokens=False))[-7:] == list("1234Ġ56")


def test_one_can_be_made_of_texts_of_ones_own(tmp_path: Path) -> None:
    made = train_tokenizer(bundled("train"), vocab_size=400)
    made.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert len(loaded) == 400
    text = "The hacker's 1999 nethack; naïve."
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == loaded.convert_tokens_to_ids("<|end|>")
