"""The geometry of a call: what each query sees."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention.kernels import reference
from bayesattn.attention.problem import SETTING_FIELDS, TENSOR_FIELDS, Problem, document_ranges
from tests.attention.cases import random_case


def test_counts_are_by_causality() -> None:
    assert ba.visible_counts(4, 4).tolist() == [1, 2, 3, 4]
    assert ba.visible_counts(2, 5).tolist() == [4, 5]
    assert ba.visible_counts(3, 5, query_offset=-1).tolist() == [0, 1, 2]
    assert ba.visible_counts(3, 5, query_offset=4).tolist() == [5, 5, 5]
    assert ba.visible_counts(3, 5, causal=False).tolist() == [5, 5, 5]


def test_counts_are_within_documents_and_padding_counts_nothing() -> None:
    ids = torch.tensor([[-1, 4, 4, 2, 2, 2], [0, 0, 0, 0, -1, -1]])
    assert ba.visible_counts(6, 6, document_ids=ids).tolist() == [[0, 1, 2, 1, 2, 3], [1, 2, 3, 4, 0, 0]]
    assert ba.visible_counts(6, 6, document_ids=ids, causal=False).tolist() == [[0, 2, 2, 3, 3, 3], [4, 4, 4, 4, 0, 0]]
    assert ba.visible_counts(2, 6, document_ids=ids).tolist() == [[2, 3], [0, 0]]


@given(st.lists(st.tuples(st.integers(-1, 0), st.integers(1, 5)), min_size=1, max_size=6))
def test_the_range_of_a_token_is_where_its_document_lies(pieces: list[tuple[int, int]]) -> None:
    ids, expected = [], []
    for number, (padding, length) in enumerate(pieces):
        start = len(ids)
        ids += [-1 if padding else number] * length
        expected += [[start, start + length]] * length
    expected = [[len(ids), 0] if i < 0 else e for i, e in zip(ids, expected, strict=True)]
    assert document_ranges(torch.tensor([ids])).tolist() == [expected]


def test_no_tokens_have_no_ranges() -> None:
    assert document_ranges(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 2)


def test_tensors_and_settings_are_all_of_a_problem() -> None:
    static = random_case(9, kv_heads=2, documents=True, tolerance=0.1, scale_prior=False).problem()
    conditioned = ba.ProfileBank(4, 6, rank=3, extent=5)
    given_prior = conditioned.given(torch.randn(2, 9, 6))
    problem = replace(
        static, parameters=given_prior.parameters, shared=given_prior.shared, family=given_prior.family.family
    )
    assert {*TENSOR_FIELDS, *SETTING_FIELDS, "shared"} == {field.name for field in fields(Problem)}
    again = Problem.of(problem.tensors(), problem.settings())
    for field in fields(Problem):
        if field.name != "shared":
            assert getattr(again, field.name) is getattr(problem, field.name)
    assert all(x is y for x, y in zip(again.shared, problem.shared, strict=True))


@given(
    queries=st.integers(1, 12),
    keys=st.integers(1, 12),
    offset=st.integers(-4, 8),
    causal=st.booleans(),
    hidden=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_fully_masked_queries_are_those_with_a_posterior_of_zeros(
    queries: int, keys: int, offset: int, causal: bool, hidden: float
) -> None:
    problem = random_case(queries, keys, hidden=hidden, query_offset=offset, causal=causal).problem()
    masked = problem.fully_masked()
    zeros = reference.posterior(problem).sum(-1) == 0
    assert not zeros.any() if masked is None else torch.equal(masked.expand_as(zeros), zeros)


@pytest.mark.parametrize("padding", [False, True])
def test_queries_of_packed_documents_are_fully_masked_only_in_padding(padding: bool) -> None:
    case = random_case(12)
    ids = torch.arange(12).div(4, rounding_mode="floor").expand(2, 12).clone()
    ids[0, :3] = -1 if padding else 0
    case.settings["document_ids"] = ids
    masked = case.problem().fully_masked()
    assert masked is None if not padding else torch.equal(masked, (ids < 0)[:, None].expand_as(masked))
