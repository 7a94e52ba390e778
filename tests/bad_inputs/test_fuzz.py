"""Files and texts changed at random: they are read, or refused with one sentence. Nothing else is raised."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bayesattn.cli.errors import sentence
from bayesattn.compute import cards, schedule
from bayesattn.compute.flops import HARDWARE, training_memory
from bayesattn.compute.savings import inference, savings
from bayesattn.errors import UserError
from bayesattn.models.loading import load_config
from bayesattn.models.shipped import resolve, shipped_names
from bayesattn.report.page import make_page
from bayesattn.studies.compare.run import compare
from bayesattn.studies.results import VERSION, load_result, read_results
from tests.bad_inputs.cases import RESULTS
from tests.bad_inputs.rows import LONGEST

EXAMPLES = 2500
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW)

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5000),
    st.sampled_from([10**6, 10**9, 2**40, 2**63, 10**19, 10**400, -(10**400)]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "bam", "rope", "nope", "many", "\ud800", "x" * 500, "[/]", "<b>"]),
    st.lists(st.integers(-2, 9) | st.floats() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-2, 9), max_size=2),
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in entries for place in ((*path, key), *places(value, (*path, key)))]


@st.composite
def mutations(draw: st.DrawFn, content: dict[str, Any]) -> Any:
    """The content with one to three values replaced, removed or added."""
    changed = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        known = places(changed)
        if not known:
            break
        *path, last = draw(st.sampled_from(known))
        part: Any = changed
        for key in path:
            part = part[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "remove":
            del part[last]
        elif action == "add" and isinstance(part, dict):
            part[draw(st.text(max_size=12))] = draw(VALUES)
        elif action == "add":
            part.append(draw(VALUES))
        else:
            part[last] = draw(VALUES)
    return changed


def as_bytes(content: object, cut: int | None) -> bytes:
    """The file of a content, complete or cut short."""
    data = json.dumps(content).encode()
    return data if cut is None else data[: cut % (len(data) + 1)]


CUT = st.none() | st.none() | st.none() | st.integers(0, 5000)


def read_or_refused(read: Callable[[], object]) -> bool:
    """Whether it was read; if not, the command line would print one sentence."""
    try:
        read()
    except UserError as problem:
        told = sentence(problem)
    else:
        return True
    assert 0 < len(told) <= LONGEST
    assert len(told.splitlines()) == 1
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESULTS)
def test_changed_result_files(kind: str, tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    file, good = tmp_path / "changed.json", tmp_path / "good.json"
    whole = {"version": VERSION, "kind": kind, **RESULTS[kind]}
    good.write_text(json.dumps(whole))
    counts = {True: 0, False: 0}

    @fuzz
    @given(mutations(whole), CUT)
    def check(content: object, cut: int | None) -> None:
        file.write_bytes(as_bytes(content, cut))
        counts[read_or_refused(lambda: read_results(file))] += 1
        read_or_refused(lambda: load_result(file)[1].to_dict())
        read_or_refused(lambda: make_page([file]).encode())
        if kind in ("passkey", "needle"):
            read_or_refused(lambda: compare([good, file]))

    check()
    assert counts[True] > 0
    assert counts[False] > EXAMPLES // 4
    tried("fuzzed files", sum(counts.values()))


@pytest.mark.slow
def test_changed_configurations(tmp_path: Path, tried: Callable[[str, int], None]) -> None:
    configs = {name: json.loads((Path(resolve(name)) / "config.json").read_text()) for name in shipped_names()}
    folder = tmp_path / "mine"
    shutil.copytree(resolve("bam-tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    counts = {True: 0, False: 0}

    @fuzz
    @given(st.sampled_from(sorted(configs)).flatmap(lambda name: mutations(configs[name])), CUT)
    def check(content: object, cut: int | None) -> None:
        (folder / "config.json").write_bytes(as_bytes(content, cut))
        counts[read_or_refused(lambda: load_config(str(folder)))] += 1
        read_or_refused(lambda: cards.find(str(folder)))

    check()
    assert counts[True] > 0
    assert counts[False] > EXAMPLES // 4
    tried("fuzzed files", sum(counts.values()))


STAGES = st.one_of(
    st.text(max_size=30),
    st.text("0123456789.KMBTkmbt@, -e", max_size=30),
    st.lists(st.from_regex(r"\d{1,20}(\.\d{1,3})?[KMBT]?@\d{1,9}[KM]?", fullmatch=True), min_size=1, max_size=4).map(
        ",".join
    ),
)


@pytest.mark.slow
def test_stages_of_any_text(tried: Callable[[str, int], None]) -> None:
    llama, counts = cards.find("llama-2-7b"), {True: 0, False: 0}

    def count(text: str) -> None:
        stages = schedule.find(text)
        result = savings(llama, stages)
        assert 0 <= result.dropped <= 1
        assert result.hours(HARDWARE["h100"], 0.4) > 0
        longest = max(stage.length for stage in stages)
        inference(llama, longest, local=0.5, span=1024)
        training_memory(llama, longest)

    @fuzz
    @given(STAGES)
    def check(text: str) -> None:
        counts[read_or_refused(lambda: count(text))] += 1
        read_or_refused(lambda: schedule.parse_tokens(text))

    check()
    assert counts[True] > EXAMPLES // 10
    assert counts[False] > EXAMPLES // 10
    tried("fuzzed files", sum(counts.values()))
