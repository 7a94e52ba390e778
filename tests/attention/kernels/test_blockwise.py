"""How blockwise cuts a problem into tiles: every element once, none too large, none for nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import blockwise, reference, registry
from bayesattn.attention.problem import Problem
from tests.attention.cases import random_case, reference_gradients


def empty_problem(batch: int, heads: int, kv_heads: int, queries: int, keys: int, causal: bool) -> Problem:
    q, kv = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, kv_heads, keys, 1)
    table = torch.zeros(heads, queries + keys - 1)
    return Problem(q, kv, kv, table, None, None, 1.0, True, causal, keys - queries)


@pytest.mark.parametrize("tile", [1, 50, 400, 3000, 100_000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_tiles_cover_what_is_visible_exactly_once(tile: int, causal: bool, heads: int, kv_heads: int) -> None:
    problem = empty_problem(3, heads, kv_heads, 13, 17, causal)
    covered: Counter[tuple[int, ...]] = Counter()
    for part in blockwise._tiles(problem, blockwise.TileLimits(tile, least_rows=3)):
        ranges = [range(s.start, s.stop) for s in part]
        covered.update(product(*ranges))
        size = 1
        for r in ranges:
            size *= len(r)
        assert size <= max(tile, 3 * 17)
    assert set(covered.values()) == {1}
    for b, g, r, i in product(range(3), range(kv_heads), range(heads // kv_heads), range(13)):
        for j in range(min(17, i + 5) if causal else 17):
            assert (b, g, r, i, j) in covered


@pytest.mark.parametrize("tile", [1, 100, 1000, 10_000])
@pytest.mark.parametrize(
    "settings",
    [{"kv_heads": 2}, {"kv_heads": 1, "documents": True}, {"causal": False, "scaled": "batch"}, {"scaled": None}],
    ids=str,
)
def test_the_size_of_a_tile_changes_nothing(tile: int, settings: dict[str, Any]) -> None:
    tiles = blockwise.TileLimits(tile, least_rows=3)
    case = random_case(31, batch=3, hidden=0.1, **settings)
    problem, grad_out = case.problem(), torch.randn_like(case.q)
    torch.testing.assert_close(blockwise.forward(problem, tiles).out, reference.forward(problem).out)
    ours = blockwise.backward(problem, grad_out, None, tiles=tiles)
    for gradient, expected in zip(ours, reference_gradients(problem, grad_out), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_documents_bound_the_keys_of_a_tile() -> None:
    problem = empty_problem(1, 1, 1, 64, 64, causal=True)
    documents = torch.arange(64).div(16, rounding_mode="floor").mul(16)
    ranges = torch.stack([documents, documents + 16], -1)[None]
    tiles = blockwise._tiles(replace(problem, documents=ranges), blockwise.TileLimits(most_rows=8))
    assert max(t.keys.stop - t.keys.start for t in tiles) <= 16


def test_a_tile_of_the_largest_problem_stays_small() -> None:
    problem = Problem(
        *(torch.zeros(1, 1).expand(1, h, 2**20, 1) for h in (8, 2, 2)),
        torch.zeros(1).expand(8, 2**21 - 1), None, None, 1.0, True, True, 0,
    )  # fmt: skip
    first = next(iter(blockwise._tiles(problem)))
    rows, keys = first.rows.stop - first.rows.start, first.keys.stop - first.keys.start
    assert rows * keys <= 2**24
    assert first.members == slice(0, 1)


def test_buffers_serve_inference_and_training_in_turn() -> None:
    case = random_case(31)
    with torch.inference_mode():
        inferred = case.attend("blockwise")
    q = case.q.clone().requires_grad_()
    out = ba.bayesian_attention(q, case.k, case.v, case.table, query_scale=case.query_scale, implementation="blockwise")
    out.sum().backward()
    torch.testing.assert_close(out.detach(), inferred.clone())


@pytest.mark.parametrize("scaled", ["heads", "batch", None])
@pytest.mark.parametrize("scale_prior", [True, False])
def test_gradients_of_what_sequences_share_are_summed(scaled: str | None, scale_prior: bool) -> None:
    case = random_case(31, batch=5, kv_heads=2, scaled=scaled, scale_prior=scale_prior)
    problem, grad_out = case.problem(), torch.randn_like(case.q)
    ours = blockwise.backward(problem, grad_out, None)
    for gradient, expected in zip(ours, reference_gradients(problem, grad_out), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("tile", [1, 1000, 100_000])
@pytest.mark.parametrize(
    "settings",
    [{"kv_heads": 2}, {"documents": True, "scaled": "batch"}, {"causal": False, "documents": True}, {"scaled": None}],
    ids=str,
)
def test_gradients_from_the_kept_posterior_are_those_of_the_reference(tile: int, settings: dict[str, Any]) -> None:
    tiles = blockwise.TileLimits(tile, least_rows=3)
    case = random_case(31, batch=3, hidden=0.1, **settings)
    problem, grad_out = case.problem(), torch.randn_like(case.q)
    kept = blockwise.forward(replace(problem, needs_posterior=True), tiles).posterior
    ours = blockwise.backward(problem, grad_out, None, tiles=tiles, kept=kept)
    for gradient, expected in zip(ours, reference_gradients(problem, grad_out), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_a_second_backward_pass_reads_the_same_posterior() -> None:
    case = random_case(31)
    tensors = [x.requires_grad_() for x in case.tensors()]
    out = case.attend("blockwise")
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), tensors)))


def test_only_small_problems_with_gradients_keep_the_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers_kept(tokens: int) -> int:
        sizes = []
        q = torch.randn(1, 2, tokens, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
            ba.bayesian_attention(q, q, q, implementation="blockwise")
        return sum(sizes)

    monkeypatch.setattr(blockwise, "MOST_KEPT_LOGITS", 2 * 32**2)
    assert numbers_kept(32) >= 2 * 32**2
    assert numbers_kept(128) < 2 * 128**2  # memory is linear in the tokens
    q = torch.randn(1, 2, 8, 4)
    assert not registry._keeps_posterior(make_problem(q, q, q, None))
    with torch.no_grad():
        assert not registry._keeps_posterior(make_problem(q.requires_grad_(), q, q, None))
