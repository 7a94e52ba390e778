from __future__ import annotations

from pathlib import Path

import pytest

from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.models import shipped


def test_a_shipped_name_is_found_unless_a_folder_of_that_name_stands_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(shipped.resolve("tokenizer")).is_dir()
    (tmp_path / "tokenizer").mkdir()
    assert shipped.resolve("tokenizer") == "tokenizer"
    assert shipped.resolve("owner/model") == "owner/model"


def test_the_shipped_tokenizer_encodes_any_text_and_digits_one_by_one() -> None:
    tokenizer = load_tokenizer("tokenizer")
    for text in ("The pass key is 71432.", " naïve 日本語 \t\n{x}", "", "\x00\x7f", "🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [tokenizer.encode(str(d)) for d in range(10)]
    assert all(len(ids) == 1 for ids in digits)
    assert tokenizer.encode("90210") == [ids[0] for number in "90210" for ids in [digits[int(number)]]]
    assert len(tokenizer) == 1024
    assert tokenizer.padding_side == "left"
