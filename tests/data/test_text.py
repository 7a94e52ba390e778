from __future__ import annotations

import json
from pathlib import Path

import pytest

from bayesattn.data import text
from bayesattn.errors import UserError


def test_the_bundled_text_is_english_and_its_splits_share_no_document() -> None:
    train, held_out = text.bundled("train"), text.bundled("held-out")
    assert len(train) + len(held_out) == 2308
    assert not set(train) & set(held_out)
    assert 1_400_000 < sum(map(len, train + held_out)) < 2_000_000
    assert sum(" the " in document for document in train) > len(train) / 2


def test_files_of_every_kind(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(12)))
    parquet.write_table(pyarrow.table({"text": ["row 0", "row 1"]}), tmp_path / "c.parquet")
    everything = ["one text", *(f"line {i}" for i in range(12)), "row 0", "row 1"]
    train, held_out = list(text.documents(str(tmp_path))), list(text.documents(str(tmp_path), "held-out"))
    assert held_out == [everything[9]]
    assert train == everything[:9] + everything[10:]
    assert list(text.documents(str(tmp_path / "a.txt"))) == ["one text"]
    assert next(text.documents("bundled")) == text.bundled("train")[0]


def test_what_cannot_be_read_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file or folder"):
        next(text.documents(str(tmp_path / "nothing")))
    with pytest.raises(UserError, match=r"has no \.txt, \.jsonl, \.parquet files"):
        next(text.documents(str(tmp_path)))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        next(text.documents(str(tmp_path / "bad.txt")))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(ValueError, match=r'line 2 of .* is not JSON with a field "text"'):
        list(text.documents(str(tmp_path / "bad.jsonl")))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r'line 1 of .* is not JSON with a field "text"'):
        list(text.documents(str(tmp_path / "bad.jsonl")))
    (tmp_path / "bad.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ValueError, match=r"'text' in line 1 of .* is None; a text is needed"):
        list(text.documents(str(tmp_path / "bad.jsonl")))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="has no column 'text'; it has words"):
        list(text.documents(str(tmp_path / "bad.parquet")))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="is not a parquet file, or is damaged"):
        list(text.documents(str(tmp_path / "bad.parquet")))


def test_a_dataset_is_asked_for_by_its_name_and_its_problem_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, configuration: str | None, **_: object) -> None:
        asked.append((name, configuration))
        raise ValueError("Config name is missing.\nPlease pick one.")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr(text, "hub_answers", lambda: True)
    for source in ("hf:imdb", "hf:owner/name", "hf:owner/name/part"):
        with pytest.raises(UserError, match=r"^the dataset .* cannot be loaded: Config name is missing\.$"):
            list(text.documents(source))
    assert asked == [("imdb", None), ("owner/name", None), ("owner/name", "part")]
