"""Arguments in the form that kernels take. Those that cannot be are in tests/bad_inputs."""

from __future__ import annotations

import torch

from bayesattn.attention.inputs import make_problem

Q = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 6, 8)


def test_the_table_has_the_distances_that_occur_and_hides_the_future() -> None:
    problem = make_problem(Q[:, :, :2], KV, KV, torch.arange(4 * 9.0).view(4, 9))
    assert problem.offset == 4
    assert problem.log_prior.shape == (4, 2 + 6 - 1)
    assert problem.log_prior[0].tolist() == [-torch.inf, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_query_scale_has_a_batch_dimension() -> None:
    assert make_problem(Q, KV, KV, None, query_scale=torch.ones(4, 6)).query_scale.shape == (1, 4, 6)  # type: ignore[union-attr]
    assert make_problem(Q, KV, KV, None, query_scale=torch.ones(2, 4, 6)).query_scale.shape == (2, 4, 6)  # type: ignore[union-attr]
