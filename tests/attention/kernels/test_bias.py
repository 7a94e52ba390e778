"""The bias of a tile: by entry of the table and by key, the same memory."""

from __future__ import annotations

import pytest
import torch

from bayesattn.attention.kernels.bias import Bias, by_entry, by_key
from tests.attention.cases import random_case

SHAPES = [(1, 1), (1, 7), (2, 1), (5, 1), (2, 2), (7, 3), (3, 7), (16, 16)]


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_key_j_of_row_i_stands_at_entry_m_minus_1_minus_i_plus_j(rows: int, keys: int) -> None:
    x = torch.randn(2, 3, rows, rows + keys - 1)
    view = by_key(x, keys)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for i in range(rows):
        torch.testing.assert_close(view[..., i, :], x[..., i, rows - 1 - i : rows - 1 - i + keys], rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_by_entry_is_the_inverse_with_zeros_elsewhere(rows: int, keys: int) -> None:
    x = torch.randn(2, 3, rows, keys)
    moved = by_entry(x, torch.full((2, 3, rows, rows + keys - 1), torch.nan))
    torch.testing.assert_close(by_key(moved.contiguous(), keys), x, rtol=0, atol=0)
    assert moved.abs().sum() == pytest.approx(float(x.abs().sum()), rel=1e-5)


@pytest.mark.parametrize("hidden", [0.0, 0.2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(9, 9, 0), (5, 12, 7), (6, 4, 3), (4, 6, -2)])
def test_written_bias_is_the_table_at_each_distance(
    hidden: float, scaled: bool, queries: int, keys: int, offset: int
) -> None:
    problem = random_case(queries, keys, hidden=hidden, scaled=None, query_offset=offset).problem()
    rows, columns = slice(queries // 3, queries), slice(1, keys)
    bias = Bias(problem, (4,))
    scale = torch.randn(4, queries, 1, dtype=torch.float64)[:, rows] if scaled else None
    entries = bias.entries(rows, columns)
    room = torch.empty(4, rows.stop - rows.start, entries.stop - entries.start, dtype=torch.float64)
    bias.write((slice(0, 4),), entries, scale, room)
    written = by_key(room, keys - 1)
    for i in range(rows.start, rows.stop):
        for j in range(1, keys):
            prior = problem.log_prior[:, i - j + keys - 1]
            expected = prior if scale is None else prior * scale[:, i - rows.start, 0]
            is_hidden = prior.isneginf()
            actual = written[:, i - rows.start, j - 1]
            torch.testing.assert_close(actual[~is_hidden], expected[~is_hidden])
            assert (actual[is_hidden] < -1e29).all()
    if scale is None:
        windows = bias.windows((slice(0, 4),), rows, columns).flip(-2)
        torch.testing.assert_close(windows, written)
