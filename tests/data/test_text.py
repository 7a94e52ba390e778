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


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("bad.txt", b"\xff\xfe\x00", r"bad\.txt is not text in UTF-8"),
        ("bad.jsonl", b'{"text": "fine"}\n{"words": 1}\n', r'line 2 of .* is not JSON with a field "text"'),
        ("bad.jsonl", b'{"text": "\xff"}\n', r'line 1 of .* is not JSON with a field "text"'),
        ("bad.jsonl", b'{"text": null}\n', r"'text' in line 1 of .* is None; a text is needed"),
        ("bad.parquet", b"PAR1 and no more", "is not a parquet file, or is damaged"),
    ],
)
def test_files_that_cannot_be_read_get_one_sentence(tmp_path: Path, file: str, content: bytes, sentence: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        list(text.documents(str(tmp_path / file)))


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"words": ["x"]}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match="has no column 'text'; it has words"):
        list(text.documents(str(tmp_path / "bad.parquet")))
    parquet.write_table(pyarrow.table({f"word {n}": ["x"] for n in range(100)}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"has no column 'text'; it has word 0, .* … .*, word 99$"):
        list(text.documents(str(tmp_path / "bad.parquet")))


def test_a_source_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file or folder"):
        next(text.documents(str(tmp_path / "nothing")))


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \.txt, \.jsonl, \.parquet files"):
        next(text.documents(str(tmp_path)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:imdb", ("imdb", None)),
        ("hf:owner/name", ("owner/name", None)),
        ("hf:owner/name/part", ("owner/name", "part")),
    ],
)
def test_a_dataset_is_loaded_by_name_and_its_error_reported(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None]
) -> None:
    requested = []

    def load(name: str, configuration: str | None, **_: object) -> None:
        requested.append((name, configuration))
        raise ValueError("Config name is missing.\nPlease pick one.")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr(text, "hub_answers", lambda: True)
    with pytest.raises(UserError, match=r"^the dataset .* cannot be loaded: Config name is missing\.$"):
        list(text.documents(source))
    assert requested == [expected]
