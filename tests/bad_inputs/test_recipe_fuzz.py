"""Random recipes and random changes: a recipe, or one sentence."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesattn.errors import UserError
from bayesattn.training.recipe import Recipe, load_recipe
from tests.bad_inputs.rows import check_sentence

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
# Seconds that one recipe may take. Each takes milliseconds, so that only a hang is caught.
LONGEST = 60
EXAMPLES = 500
SPECIAL = (
    None, True, "", "\0", "\ud800", "../..", "[", "&a", "*a", "!!python/name:os.system", "evil", "y" * 9000,
    -1, 0, 10**9, 10**20, 10**400, 1e308, 1e-320, float("nan"), float("inf"),
    [], {}, [[[[]]]], {"a": {"b": {}}}, {1: 2}, {None: None},
)  # fmt: skip
PIECES = (
    "&a ", "*a", "<<: ", "!!int ", "!!binary ", "? ", ": ", "- ", "[", "{", "]", "}", "|\n", ">-\n", "%YAML 9.9\n",
    "---\n", "...\n", "\t", "#", "'", '"', "\0", "\x85", "\u2028", "\ufeff", "é", "1:1", "0x", "0b", "1_0", "1e999",
    ".nan", "2020-13-45", "null", "base: bam-tiny.yaml\n", "seed: 1\n", "1" * 5000, "[" * 500, " " * 50,
)  # fmt: skip

leaves = st.sampled_from(SPECIAL) | st.integers() | st.floats() | st.text(max_size=30) | st.booleans()
trees = st.recursive(
    leaves,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=10), part, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(
    [f"{section}.{key}" for path in RECIPES for section, part in (yaml.safe_load(path.read_text()) or {}).items()
     if isinstance(part, dict) for key in part] + ["name", "seed", "base", "start", "model", "expected.parameters"]
)  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """An error if it hangs."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {LONGEST} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_recipe_or_sentence(path: Path, changes: list[str]) -> None:
    with bounded():
        try:
            assert isinstance(load_recipe(path, changes), Recipe)
        except UserError as problem:
            check_sentence(str(problem), "")


def mutated(text: str, random: Random) -> str:
    """A text after a few deletions, repetitions, moves and insertions."""
    for _ in range(random.randint(1, 6)):
        at, size = random.randrange(len(text) + 1), random.choice((1, 2, 8, 40))
        action = random.randrange(5)
        if action == 0:
            text = text[:at] + text[at + size :]
        elif action == 1:
            text = text[:at] + text[at : at + size] * random.choice((2, 3, 50)) + text[at + size :]
        elif action == 2:
            to = random.randrange(len(text) + 1)
            text = text[:to] + text[at : at + size] + text[to:]
        elif action == 3:
            text = text[:at] + random.choice(PIECES) + text[at:]
        else:
            codes = (random.choice((random.randrange(128), random.randrange(0xD800))) for _ in range(3))
            text = text[:at] + "".join(map(chr, codes)) + text[at:]
    return text


def grafted(tree: Any, random: Random, part: Any) -> Any:
    """A tree with `part` somewhere in it."""
    if isinstance(tree, dict) and tree and random.random() < 0.8:
        key = random.choice(list(tree))
        return {**tree, key: grafted(tree[key], random, part)}
    if isinstance(tree, list) and tree and random.random() < 0.7:
        at = random.randrange(len(tree))
        return [*tree[:at], grafted(tree[at], random, part), *tree[at + 1 :]]
    return part


def as_yaml(tree: Any) -> str:
    text: str = yaml.safe_dump(tree, allow_unicode=True)
    return text


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which bases of recipes are found."""
    for path in RECIPES:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def run(check: Callable[..., None], what: dict[str, Any], tried: Callable[[str, int], None]) -> None:
    tried("fuzzed files", EXAMPLES)
    settings(max_examples=EXAMPLES)(given(**what)(check))()


@pytest.mark.slow
def test_a_shipped_recipe_with_other_text_in_it(folder: Path, tried: Callable[[str, int], None]) -> None:
    def check(path: Path, seed: int) -> None:
        check_recipe_or_sentence(write(folder, mutated(path.read_text(), Random(seed))), [])

    run(check, {"path": st.sampled_from(RECIPES), "seed": st.integers(0, 2**32)}, tried)


@pytest.mark.slow
def test_a_shipped_recipe_with_another_value_in_it(folder: Path, tried: Callable[[str, int], None]) -> None:
    def check(path: Path, seed: int, part: Any) -> None:
        text = as_yaml(grafted(yaml.safe_load(path.read_text()), Random(seed), part))
        check_recipe_or_sentence(write(folder, text), [])

    run(check, {"path": st.sampled_from(RECIPES), "seed": st.integers(0, 2**32), "part": trees}, tried)


@pytest.mark.slow
def test_random_yaml(folder: Path, tried: Callable[[str, int], None]) -> None:
    def check(tree: Any) -> None:
        check_recipe_or_sentence(write(folder, as_yaml(tree)), [])

    run(check, {"tree": trees}, tried)


@pytest.mark.slow
def test_random_bytes(folder: Path, tried: Callable[[str, int], None]) -> None:
    def check(content: bytes | list[str]) -> None:
        path = folder / "mine.yaml"
        path.write_bytes(content if isinstance(content, bytes) else "".join(content).encode())
        check_recipe_or_sentence(path, [])

    run(check, {"content": st.binary(max_size=300) | st.lists(st.sampled_from(PIECES), max_size=40)}, tried)


@pytest.mark.slow
def test_random_changes(folder: Path, tried: Callable[[str, int], None]) -> None:
    def check(path: Path, key: str, part: Any, loose: str, seed: int) -> None:
        change = mutated(f"{key}={as_yaml(part)}", Random(seed)) if seed % 2 else f"{key}={as_yaml(part)}"
        check_recipe_or_sentence(folder / path.name, [change])
        check_recipe_or_sentence(folder / path.name, [loose])

    what = {
        "path": st.sampled_from(RECIPES),
        "key": keys,
        "part": trees,
        "loose": st.text(),
        "seed": st.integers(0, 2**32),
    }
    run(check, what, tried)
