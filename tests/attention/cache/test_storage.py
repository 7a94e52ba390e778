"""Stores hold what was appended, minus what was evicted, whatever the order of the two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention.cache.storage import LEAST_ROOM, Storage


def tokens(first: int, number: int, heads: int = 2) -> torch.Tensor:
    """Keys whose entries are their positions, `[1, heads, number, 3]`."""
    return torch.arange(float(first), first + number)[None, None, :, None].expand(1, heads, -1, 3)


def started(heads: int = 2, query_heads: int = 2, same_positions: bool = False) -> Storage:
    storage = Storage(same_positions)
    storage.start(tokens(0, 0, heads), tokens(0, 0, heads), query_heads)
    return storage


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300), st.integers(0, 20)), max_size=12),
    st.sampled_from([0, 500]),
)
def test_a_store_holds_a_range_of_positions(steps: list[tuple[int, int, int]], reserve: int) -> None:
    storage = started()
    (store,) = storage.stores
    length = 0
    for new, kept, removed in steps:
        store.append(tokens(length, new), tokens(length, new), reserve)
        length += new
        store.evict_before(length - kept)
        storage.remove_last(min(removed, store.size))
        length = store.first + store.size
        for x in store.view():
            assert torch.equal(x, tokens(store.first, store.size))
        assert store.k.shape[2] <= max(reserve, 2 * (store.size + new) + 128)


def test_memory_is_given_back_once_half_of_it_is_unused() -> None:
    (store,) = started().stores
    store.append(tokens(0, 1000), tokens(0, 1000), reserve=0)
    full = store.bytes
    store.evict_before(900)
    assert store.bytes < 0.2 * full


def test_a_small_store_does_not_move_with_every_token() -> None:
    (store,) = started().stores
    store.append(tokens(0, 20), tokens(0, 20), reserve=0)
    moves = 0
    for position in range(20, 220):
        before = store.k.data_ptr()
        store.append(tokens(position, 1), tokens(position, 1), reserve=0)
        store.evict_before(position - 8)
        moves += store.k.data_ptr() != before
    assert moves <= 200 // LEAST_ROOM + 2


def test_the_log_prior_is_of_the_distances_held_farthest_first() -> None:
    prior = ba.Laplace(2, [0.5, 2.0])
    (store,) = started().stores
    store.append(tokens(0, 5), tokens(0, 5), reserve=0)
    store.evict_before(2)
    expected = prior(torch.tensor([2, 1, 0]))
    torch.testing.assert_close(store.log_prior(prior, torch.zeros(1)), expected)
    assert not store.hides
    assert store.log_prior(prior, torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("same_positions", "spans", "classes"),
    [
        (False, [10, 12, 5000, None], [[0, 1], [2], [3]]),
        (False, [10, 60, 20, 63], [[0, 1, 2, 3]]),
        (False, [None] * 4, [[0, 1, 2, 3]]),
        (True, [10, 12, 5000, None], [[0, 1, 2, 3]]),
    ],
    ids=str,
)
def test_heads_whose_spans_nearly_agree_share_a_store(
    same_positions: bool, spans: list[int | None], classes: list[list[int]]
) -> None:
    storage = started(heads=4, query_heads=8, same_positions=same_positions)
    storage.append(tokens(0, 7, 4), tokens(0, 7, 4), reserve=0)
    storage.set_spans(spans)
    assert [store.heads.tolist() for store in storage.stores] == classes
    for store in storage.stores:
        assert store.query_heads.tolist() == [h for g in store.heads.tolist() for h in (2 * g, 2 * g + 1)]
        assert torch.equal(store.heads[store.kv_index[:, 0]], store.query_heads // 2)
        assert torch.equal(store.view()[0], tokens(0, 7, len(store.heads)))


def test_a_store_has_the_longest_span_of_its_heads() -> None:
    storage = started(same_positions=True)
    storage.append(tokens(0, 20), tokens(0, 20), reserve=0)
    storage.set_spans([3, 8])
    assert storage.spans == [8, 8]
    storage.evict(20)
    assert storage.first == 13  # the query at position 20 needs 7 before it
    storage.set_spans([3, None])
    assert storage.spans == [None, None]


def test_sequences_are_reordered_and_repeated() -> None:
    k = torch.randn(3, 2, 4, 5)
    storage = Storage(same_positions=False)
    storage.start(k, k, 2)
    storage.append(k, k, reserve=0)
    storage.reorder(torch.tensor([2, 2, 0, 1]))
    assert storage.batch == 4
    assert torch.equal(storage.stores[0].view()[1], k[[2, 2, 0, 1]])


def test_bytes_count_keys_and_values() -> None:
    storage = started()
    assert storage.bytes == 0
    storage.append(tokens(0, 10), tokens(0, 10), reserve=100)
    assert storage.bytes == 2 * 4 * 2 * 100 * 3
    assert storage.bytes_per_position == 2 * 4 * 2 * 3
