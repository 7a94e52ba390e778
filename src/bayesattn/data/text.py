"""Sources of documents: the bundled text, local files, a Hugging Face dataset by name."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

from bayesattn.errors import UserError, cut, first_line, shown
from bayesattn.hub import hub_answers

Split = Literal["train", "held-out"]

BUNDLED = "bundled"
# Every tenth document is held out from training.
HELD_OUT_EVERY = 10


def bundled(split: Split) -> list[str]:
    """Entries of the Jargon File 4.4.7, which is in the public domain."""
    packed = files("bayesattn").joinpath("assets/text/jargon.txt.xz").read_bytes()
    return _choose(lzma.decompress(packed).decode().split("\f"), split)


def documents(source: str, split: Split = "train", field: str = "text") -> Iterator[str]:
    """Documents of a source. Every tenth document is in the held-out split, the others in the training split.

    Args:
        source: `bundled`; a .txt, .jsonl or .parquet file; a folder of them; or a Hugging Face dataset, as
            `hf:owner/name` or `hf:owner/name/configuration`, which is streamed.
        split: `train` or `held-out`.
        field: field or column with the text, in JSON lines, parquet files and datasets. A .txt file is one document.

    Raises:
        UserError: the source cannot be read.
    """
    if not source:
        raise UserError("the name of the text is empty; bundled, a file, a folder or hf:owner/name is needed")
    if source == BUNDLED:
        yield from bundled(split)
        return
    texts = _from_hub(source[3:], field) if source.startswith("hf:") else _from_files(Path(source), field)
    for number, text in enumerate(texts):
        if _held_out(number) == (split == "held-out"):
            yield text


def _held_out(number: int) -> bool:
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _choose(texts: Sequence[str], split: Split) -> list[str]:
    return [text for number, text in enumerate(texts) if _held_out(number) == (split == "held-out")]


def _from_files(path: Path, field: str) -> Iterator[str]:
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    kinds = (".txt", ".jsonl", ".parquet")
    paths = sorted(p for p in path.rglob("*") if p.suffix in kinds and p.is_file()) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"{path} has no {', '.join(kinds)} files")
    for file in paths:
        if file.suffix == ".jsonl":
            yield from _from_lines(file, field)
        elif file.suffix == ".parquet":
            yield from _from_parquet(file, field)
        else:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError as problem:
                raise UserError(f"{file} is not text in UTF-8") from problem
            except OSError as problem:
                raise UserError(f"{file} cannot be read: {problem.strerror}") from problem


def _from_lines(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError, RecursionError) as problem:
                raise UserError(f'line {number} of {file} is not JSON with a field "{field}"') from problem
            yield _text(text, f"line {number} of {file}", field)


def _from_parquet(file: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("parquet files need pyarrow: pip install 'bayesattn[train]'") from missing
    try:
        table = parquet.ParquetFile(file)
    except (ArrowInvalid, OSError) as problem:
        raise UserError(f"{file} is not a parquet file, or is damaged") from problem
    if field not in table.schema_arrow.names:
        raise UserError(f"{file} has no column {field!r}; it has {cut(', '.join(table.schema_arrow.names), 120)}")
    for batch in table.iter_batches(columns=[field]):
        for text in batch.column(0).to_pylist():
            yield _text(text, str(file), field)


def _text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{field!r} in {where} is {shown(value)}; a text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise UserError(f"{field!r} in {where} has half of a character (a surrogate)") from problem
    return value


def _from_hub(name: str, field: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("Hugging Face datasets need: pip install 'bayesattn[train]'") from missing
    if not hub_answers():
        raise UserError(f"the dataset {name} cannot be reached; is there a network?")
    dataset, configuration = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    try:
        rows = load_dataset(dataset, configuration or None, split="train", streaming=True)
    except (OSError, ValueError) as problem:
        raise UserError(f"the dataset {name} cannot be loaded: {first_line(problem)}") from problem
    for row in rows:
        if field not in row:
            raise UserError(f"the dataset {name} has no field {field!r}; it has {cut(', '.join(row), 120)}")
        yield _text(row[field], f"the dataset {name}", field)
