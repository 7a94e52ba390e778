"""Stores hold what was appended, minus what was evicted, whatever the order of the two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention.cache.storage import DEFAULT_ROOM, Storage, select


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
    assert moves <= 200 // DEFAULT_ROOM.least + 2


def test_the_log_prior_is_of_the_distances_held_farthest_first() -> None:
    prior = ba.Laplace(2, [0.5, 2.0])
    (store,) = started().stores
    store.append(tokens(0, 5), tokens(0, 5), reserve=0)
    store.evict_before(2)
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    assert not store.has_table(single)
    store.make_table(prior, single)
    torch.testing.assert_close(store.log_prior()[0, :, 0], prior(torch.tensor([2, 1, 0])))
    assert store.has_table(single)
    assert not store.has_table(double)
    assert not store.hides
    store.make_table(prior * ba.Window(2, 2), double)
    assert store.log_prior().dtype == torch.float64
    assert store.log_prior()[0, :, 0].isneginf().tolist() == [[True, False, False]] * 2
    assert store.hides
    assert not store.hides_own


def with_spans(spans: list[int | None], positions: int, least_freed: int = 0, same_positions: bool = False) -> Storage:
    """A storage of four heads that are used by two query heads each, after an eviction."""
    storage = started(heads=4, query_heads=8, same_positions=same_positions)
    storage.append(tokens(0, positions, 4), tokens(0, positions, 4), reserve=0)
    storage.set_spans(spans, least_freed)
    storage.evict(positions)
    return storage


@pytest.mark.parametrize(
    ("positions", "least_freed", "spans", "parts"),
    [
        (1000, 0, [10, None, 10, 500], [[0, 2], [3], [1]]),
        (1000, 0, [10, 12, 12, 10], [[0, 3], [1, 2]]),
        (1000, 100, [10, 12, 500, 500], [[0, 1], [2, 3]]),
        (1000, 300, [10, 12, 500, 500], [[0, 1, 2, 3]]),  # 245 freed, on average
        (1000, 200, [10, 12, 500, None], [[0, 1], [2, 3]]),
        (1000, 100, [300, 10, 200, None], [[0, 1, 2], [3]]),  # frees more than a store of the two shorter ones
        (1000, 0, [None] * 4, [[0, 1, 2, 3]]),
        (110, 50, [10, None, 10, None], [[0, 2], [1, 3]]),
        (109, 50, [10, None, 10, None], [[0, 1, 2, 3]]),
    ],
    ids=str,
)
def test_a_store_is_split_once_that_frees_enough(
    positions: int, least_freed: int, spans: list[int | None], parts: list[list[int]]
) -> None:
    storage = with_spans(spans, positions, least_freed)
    assert [store.heads.tolist() for store in storage.stores] == parts
    for store in storage.stores:
        assert store.query_heads.tolist() == [h for g in store.heads.tolist() for h in (2 * g, 2 * g + 1)]
        of_store = [spans[head] for head in store.heads.tolist()]
        assert store.span == (None if None in of_store else max(s for s in of_store if s is not None))
        kept = positions if store.span is None else min(positions, store.span - 1)  # and the query's own
        assert torch.equal(store.view()[0], tokens(positions - kept, kept, len(of_store)))
    assert storage.spans == spans
    queries = torch.arange(8)[None, :, None]
    assert torch.equal(storage.join([queries[:, store.query_heads] for store in storage.stores]), queries)


def test_heads_that_keep_the_same_positions_stay_in_one_store() -> None:
    assert len(with_spans([10, 12, 500, None], 1000, same_positions=True).stores) == 1


def test_the_bounded_heads_of_a_store_are_those_with_a_span() -> None:
    (store,) = with_spans([10, None, 12, None], 1000, least_freed=1000).stores
    assert store.bounded is not None
    assert store.bounded.query_numbers == [0, 1, 4, 5]
    x = tokens(0, 8, 4) + torch.arange(4.0)[None, :, None, None]
    assert torch.equal(select(x, store.bounded.in_store), x[:, [0, 2]])
    (store,) = with_spans([None] * 4, 1000).stores
    assert store.bounded is None


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
