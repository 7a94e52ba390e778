"""The cache under priors that depend on the query: nothing that a later query may favour is evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.attention.cache.spans import SpanLimits

WIDTH, HEADS, TOKENS = 6, 4, 90
LIMITS = SpanLimits(least_kept=8, least_freed=1, horizon=512)
PRIORS: dict[str, Callable[[], ba.ConditionedPrior]] = {
    "gaussian": lambda: ba.ConditionedGaussian(HEADS, WIDTH, hidden=5),
    "profiles": lambda: ba.ProfileBank(HEADS, WIDTH, rank=3, extent=11),
    "fire": lambda: ba.Fire(HEADS, training_length=8, hidden=5),
    "profiles × window": lambda: ba.ProfileBank(HEADS, WIDTH, rank=3, extent=200) * ba.Window(HEADS, 20),
    "gaussian × windows": lambda: (
        ba.ConditionedGaussian(HEADS, WIDTH, hidden=5) * ba.Laplace(HEADS) * ba.Window(HEADS, [5, 9, 60, 60])
    ),
}
priors = pytest.mark.parametrize("family", PRIORS)


def inputs(family: str, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, TOKENS, 8, dtype=dtype)
    k, v = torch.randn(2, batch, 2, TOKENS, 8, dtype=dtype)
    states = torch.arange(TOKENS) if family == "fire" else torch.randn(batch, TOKENS, WIDTH, dtype=dtype)
    return q, k, v, states


@priors
@pytest.mark.parametrize("pieces", [[1] * 90, [40, *[1] * 50], [33, 57], [90]], ids=len)
@pytest.mark.parametrize("scaled", [False, True])
def test_pieces_give_what_the_whole_gives(family: str, pieces: list[int], scaled: bool) -> None:
    prior, (q, k, v, states) = PRIORS[family](), inputs(family)
    scale = ba.ScalableSoftmax(HEADS) if scaled else None
    whole = ba.bayesian_attention(q, k, v, prior.given(states), query_scale=scale)
    parameters = prior(states)
    cache = ba.LayerCache(prior, query_scale=scale, limits=LIMITS, rollback=2)
    parts, first = [], 0
    for number in pieces:
        part = slice(first, first + number)
        parts.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], parameters[:, :, part]))
        first += number
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-5, rtol=1e-5)


@priors
def test_padding_is_not_seen(family: str) -> None:
    prior, (q, k, v, states) = PRIORS[family](), inputs(family)
    padding = torch.tensor([0, 7])
    ids = torch.where(torch.arange(TOKENS) < padding[:, None], -1, 0)
    whole = ba.bayesian_attention(q, k, v, prior.given(states), document_ids=ids)
    cache = ba.LayerCache(prior, limits=LIMITS)
    cache.pad_left(padding)
    parameters = prior(states)
    for i in range(TOKENS):
        at = slice(i, i + 1)
        token = cache.attend(q[:, :, at], k[:, :, at], v[:, :, at], parameters[:, :, at])
        torch.testing.assert_close(token, whole[:, :, at], atol=1e-5, rtol=1e-5)


def test_only_what_a_window_hides_is_evicted() -> None:
    for family, spans in {
        "gaussian": [None, None], "profiles": [None, None], "profiles × window": [20, 20], "gaussian × windows": [9, 60]
    }.items():  # fmt: skip
        prior, (q, k, v, states) = PRIORS[family](), inputs(family)
        cache = ba.LayerCache(prior, limits=LIMITS, rollback=0, tolerance=0.5)
        cache.attend(q, k, v, prior(states))
        assert cache.spans == spans, family
        assert "a conditioned prior, so only keys that a static factor hides are evicted" in str(cache)


@priors
def test_a_cache_is_cropped_and_reordered(family: str) -> None:
    prior, (q, k, v, states) = PRIORS[family](), inputs(family)
    whole = ba.bayesian_attention(q, k, v, prior.given(states))
    parameters = prior(states)
    cache = ba.LayerCache(prior, limits=LIMITS, rollback=10)
    first, last = slice(0, 60), slice(55, TOKENS)
    cache.attend(q[:, :, first], k[:, :, first], v[:, :, first], parameters[:, :, first])
    cache.crop(55)
    cache.reorder(torch.tensor([1, 0]))
    swapped = parameters if len(parameters) == 1 else parameters.flip(0)
    out = cache.attend(q.flip(0)[:, :, last], k.flip(0)[:, :, last], v.flip(0)[:, :, last], swapped[:, :, last])
    torch.testing.assert_close(out, whole.flip(0)[:, :, last], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("prior", "parameters", "message"),
    [
        (ba.Laplace(HEADS), torch.zeros(1, 1, TOKENS, 1), "Laplace does not depend on the query; attend takes no"),
        (PRIORS["gaussian"](), None, "ConditionedGaussian depends on the query; attend needs parameters=prior"),
        (PRIORS["gaussian"](), torch.zeros(2, HEADS, 5, 3), "was given the states of 5 queries and q has 90"),
        (PRIORS["gaussian"](), torch.full((2, HEADS, TOKENS, 3), torch.nan), "parameters that are NaN or infinite"),
    ],
    ids=["static", "none", "too few", "NaN"],
)
def test_wrong_parameters_get_one_sentence_and_change_nothing(
    prior: ba.Prior | ba.ConditionedPrior, parameters: Tensor | None, message: str
) -> None:
    q, k, v, _ = inputs("gaussian")
    cache = ba.LayerCache(prior)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.attend(q, k, v, parameters)
    assert cache.length == 0


def test_a_bank_that_changes_is_noticed() -> None:
    prior, (q, k, v, states) = PRIORS["profiles"](), inputs("profiles")
    cache = ba.LayerCache(prior)
    cache.attend(q, k, v, prior(states))
    with torch.no_grad():
        next(prior.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="the prior or the query scale changed"):
        cache.attend(q, k, v, prior(states))
