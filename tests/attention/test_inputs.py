"""Each mistake is answered with one sentence: what was given and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import bayesattn as ba
from bayesattn.attention.inputs import make_problem

Q = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 6, 8)
IDS = torch.zeros(2, 6, dtype=torch.long)


def broken_laplace() -> ba.Prior:
    prior = ba.Laplace(4)
    prior.slopes[2] = math.nan
    return prior


class Misshapen(ba.Prior):
    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return distance.float()


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("list", {"q": [1.0]}, "q is a list; it must be a tensor"),
    ("rank", {"q": Q[0]}, r"q has shape \[4, 6, 8\]; it must be \[batch, heads, tokens, head size\]"),
    ("integers", {"q": Q.long()}, "q is torch.int64; float64, float32, bfloat16 and float16 are allowed"),
    ("dtypes", {"q": Q.half()}, "k is torch.float32 on cpu and q is torch.float16 on cpu; they must agree"),
    ("values", {"v": KV[:, :, :5]}, r"k has shape \[2, 2, 6, 8\] and v \[2, 2, 5, 8\]"),
    ("batch", {"q": Q[:1]}, r"q has shape \[1, 4, 6, 8\] and k \[2, 2, 6, 8\]; batch and head size must agree"),
    ("size", {"q": Q[..., :4]}, "batch and head size must agree"),
    ("no size", {"q": Q[..., :0], "k": KV[..., :0]}, "head size and value size must be at least 1"),
    ("heads", {"q": Q[:, :3]}, "q has 3 heads and k 2; the heads of k must divide those of q"),
    ("prior heads", {"log_prior": ba.Uniform(3)}, "Uniform has 3 heads and q has 4; they must agree"),
    ("prior type", {"log_prior": "alibi"}, r"log_prior is a str; a Prior, a table \[heads, n\] or None"),
    ("prior NaN", {"log_prior": broken_laplace()}, r"Laplace gives NaN or more than 1e\+28 for heads \[2\]"),
    ("prior shape", {"log_prior": Misshapen(4)}, r"Misshapen returned shape \[6\] for 6 distances"),
    ("table NaN", {"log_prior": torch.full((4, 6), math.nan)}, r"gives NaN or more than 1e\+28 for heads \[0, 1, "),
    ("table inf", {"log_prior": torch.full((4, 6), math.inf)}, "log-priors are numbers up to that, or -inf"),
    ("table heads", {"log_prior": torch.zeros(2, 6)}, r"a floating-point tensor \[4, n\], one row per head"),
    ("table dtype", {"log_prior": torch.zeros(4, 6).long()}, "the log_prior table is torch.int64"),
    ("table short", {"log_prior": torch.zeros(4, 5)}, "has 5 entries; causal distances 0 … 5 need 6"),
    ("table far", {"log_prior": torch.zeros(4, 6), "query_offset": 3}, "causal distances 0 … 8 need 9"),
    ("table sides", {"log_prior": torch.zeros(4, 6), "causal": False}, "need 11 or a larger odd number"),
    ("table even", {"log_prior": torch.zeros(4, 12), "causal": False}, "need 11 or a larger odd number"),
    ("scale shape", {"query_scale": torch.ones(6)}, r"of shape \[4, 6\] or \[2, 4, 6\] are allowed"),
    ("scale NaN", {"query_scale": torch.full((4, 6), math.nan)}, "query_scale has NaN or infinite entries"),
    ("scale type", {"query_scale": 2.0}, "query_scale is a float; a tensor, a module or None is allowed"),
    ("learned scale", {"softmax_scale": torch.ones(())}, "softmax_scale is a tensor; a number is needed"),
    ("scale module", {"query_scale": lambda counts: None}, "module returned a NoneType; a tensor is needed"),
    ("softmax scale", {"softmax_scale": math.inf}, "softmax_scale is inf; it must be a finite number"),
    ("tolerance", {"tolerance": -0.1}, r"tolerance is -0.1; it must be a number in \[0, 1\)"),
    ("tolerance one", {"tolerance": 1.0}, r"tolerance is 1.0; it must be a number in \[0, 1\)"),
    ("tolerance NaN", {"tolerance": math.nan}, "tolerance is nan"),
    ("offset", {"query_offset": 1.5}, "query_offset is 1.5; the position of the first query, a whole number"),
    ("implementation", {"implementation": "flash"}, "implementation is 'flash'; allowed are auto, reference, "),
    ("ids type", {"document_ids": IDS.float()}, "document_ids is torch.float32; a tensor of integers is needed"),
    ("ids list", {"document_ids": [0]}, "document_ids is list; a tensor of integers is needed"),
    ("ids shape", {"document_ids": IDS[:1]}, r"document_ids has shape \[1, 6\] on cpu; one id per key, \[2, 6\]"),
    ("ids offset", {"document_ids": IDS, "query_offset": 1}, "every query must stand at the position of a key"),
    ("ids pieces", {"document_ids": torch.tensor([[0, 0, 1, 1, 0, 0], [0] * 6])}, "one unbroken stretch"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_gets_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        ba.bayesian_attention(**{"q": Q, "k": KV, "v": KV, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q has shape \[4, 6, 8\]"),
        ({"log_prior": ba.Uniform(3)}, "Uniform has 3 heads and q has 4"),
        ({"document_ids": IDS.float()}, "document_ids is torch.float32"),
    ],
    ids=["q", "prior", "documents"],
)
def test_the_posterior_checks_the_same(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ba.posterior(**{"q": Q, "k": KV, **change})


def test_the_table_has_the_distances_that_occur_and_hides_the_future() -> None:
    problem = make_problem(Q[:, :, :2], KV, KV, torch.arange(4 * 9.0).view(4, 9))
    assert problem.offset == 4
    assert problem.log_prior.shape == (4, 2 + 6 - 1)
    assert problem.log_prior[0].tolist() == [-torch.inf, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_query_scale_has_a_batch_dimension() -> None:
    assert make_problem(Q, KV, KV, None, query_scale=torch.ones(4, 6)).query_scale.shape == (1, 4, 6)  # type: ignore[union-attr]
    assert make_problem(Q, KV, KV, None, query_scale=torch.ones(2, 4, 6)).query_scale.shape == (2, 4, 6)  # type: ignore[union-attr]
