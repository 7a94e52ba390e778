from __future__ import annotations

import pytest

from bayesattn.studies.bench.inputs import Inputs, Shape
from bayesattn.studies.bench.short import measure as short

SHAPE = Shape.parse("2x4:2x64x8/3")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "MATRIX", 64)
    monkeypatch.setattr(short, "MOST_ROUNDS", 3)


def test_both_phases_of_every_shape_are_compared_with_plain_attention() -> None:
    rows = [row for part in short.measure([SHAPE, Shape.parse("1x2x70x8")]) for row in part]
    assert [(row.shape, row.phase) for row in rows] == [
        (shape, phase) for shape in ("2x4:2x64x8/3", "1x2x70x8") for phase in (short.FORWARD, short.TRAINING)
    ]
    for row in rows:
        assert row.seconds is not None
        assert row.ratio == pytest.approx(row.seconds / row.plain_seconds)
        assert row.error < 1e-4


def test_attention_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "attend", lambda self: 2 * self.q)
    (rows,) = short.measure([SHAPE])
    for row in rows:
        assert row.seconds is row.ratio is row.gemm_share is None
        assert row.note.endswith("not timed")
        assert row.plain_seconds > 0


def test_the_share_of_the_rate_counts_two_products_forward_and_five_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "seconds_in_turn", lambda work, rounds: dict.fromkeys(work, 1.0))
    (rows,) = short.measure([Shape.parse("1x2x4x8")])
    product = 2 * 2 * 10 * 8  # two heads, ten visible pairs, head size 8
    shares = [row.gemm_share for row in rows]
    assert shares == pytest.approx([products * product / (2 * short.MATRIX**3) for products in (2, 7)])


def test_all_five_inputs_get_gradients_and_the_forward_pass_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def call(work: dict[str, object], rounds: int) -> dict[str, float]:
        if "ours" in work:
            calls.append(work["ours"]())  # type: ignore[operator]
        return dict.fromkeys(work, 1.0)

    monkeypatch.setattr(short, "seconds_in_turn", call)
    list(short.measure([SHAPE]))
    out, gradients = calls
    assert not out.requires_grad
    parameters = len(Inputs.make(SHAPE).trainable())
    assert len(gradients) == parameters > 4
    assert all(gradient.norm() > 0 for gradient in gradients)
