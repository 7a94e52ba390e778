from __future__ import annotations

from dataclasses import replace

import pytest

from bayesattn.studies.bench.long import measure as long
from bayesattn.studies.bench.long import show


def row(mix: str, tokens: int, seconds: float | None, dense: float | None = None) -> long.Prefill:
    return long.Prefill(mix, tokens, dense, seconds, None, None, None, None)


def test_exponents_are_those_of_the_rows_from_16k_on() -> None:
    rows = [row(long.LOCAL, n, 1e-6 * n**1.1, 1e-9 * n**2) for n in (16_384, 32_768, 65_536)]
    rows += [row(long.LOCAL, 1024, 100.0), row(long.FLAT, 16_384, 1.0)]
    local, half, flat = long.exponents(rows)
    assert local.pruned == pytest.approx(1.1)
    assert local.dense == pytest.approx(2.0)
    assert local.lengths == [16_384, 32_768, 65_536]
    assert half.pruned is None
    assert flat.pruned is None


def test_a_pruned_prefill_needs_at_least_the_memory_of_its_output() -> None:
    output = long.HEADS * 16_384 * long.SIZE * 4
    assert output < long.peak_memory(long.LOCAL, 16_384) < 20 * output


def test_plain_attention_has_its_memory_and_where_it_was_not_run_what_it_would_take() -> None:
    rows = [row(long.LOCAL, n, 1.0, dense) for n, dense in ((64, None), (128, 2.0), (512, None))]
    rows[1] = replace(rows[1], dense_peak_bytes=3 * 10**6)
    fields = [show._plain_field(rows, each) for each in rows]
    assert fields == ["too long", "2.0 s\n3 MB", "would take about 32 s"]
    output = long.HEADS * 2048 * long.SIZE * 4
    assert output <= long.peak_memory(long.PLAIN, 2048) < 20 * output


def test_what_would_take_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"dense": 5.0, **{f"{plan}{mix}": 2.0 for mix in long.mixes() for plan in ("", "plan ")}}
    monkeypatch.setattr(long, "seconds_in_turn", lambda work: {name: times[name] for name in work})
    short, longer, longest = long.run_prefill([64, 128, 256], memory=False, longest=10.0)
    assert all(row.dense_seconds == 5.0 and row.pruned_seconds == 2.0 for row in short)
    assert all(row.dense_seconds is None and row.pruned_seconds == 2.0 for row in longer)
    assert all(row.dense_seconds is None for row in longest)
    monkeypatch.setitem(times, long.FLAT, 9.0)
    _, later = long.run_prefill([64, 128], memory=False, longest=10.0)
    assert {row.mix: row.note for row in later}[long.FLAT] == "would take about 36 s"
