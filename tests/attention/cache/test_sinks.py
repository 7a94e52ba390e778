"""A cache with sinks is attention with sinks over the whole sequence, whatever it evicts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.attention.cache.sequences import EARLY, contents

COUNT, LENGTH = 3, 90


def sinks(prior: ba.Prior) -> ba.Sinks:
    made = ba.Sinks(prior, COUNT).double()
    torch.nn.init.normal_(made.log_prior)
    return made


def tokens(heads: int, kv_heads: int, batch: int = 2, length: int = LENGTH, size: int = 8) -> list[Tensor]:
    return [torch.randn(batch, h, length, size, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


def whole(q: Tensor, k: Tensor, v: Tensor, made: ba.Sinks, padding: Tensor | None, **settings: Any) -> Tensor:
    ids = None if padding is None else -(torch.arange(k.shape[2]) < padding[:, None]).long()
    return ba.bayesian_attention(q, k, v, made, document_ids=ids, implementation="reference", **settings)


def fed(cache: ba.LayerCache, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], first: int = 0) -> Tensor:
    """What the cache returns for pieces of these sizes, one after the other."""
    outs = []
    for size in sizes:
        part = slice(first, first + size)
        outs.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part]))
        first += size
    return torch.cat(outs, 2)


PRIORS = {
    "window": lambda: ba.Window(4, 9),
    "local": lambda: ba.Laplace(4, [1.0, 2.0, 3.0, 0.9]),
    "some local": lambda: ba.Laplace(4, [1.0, 2.0, 0.001, 0.001]),
    "retrieval": lambda: ba.GeneralizedGaussian.from_shape([-1.0] * 4, [4.0] * 4, epsilon=1.0),
    "uniform": lambda: ba.Uniform(4),
}
SIZES = {"one by one": [1] * LENGTH, "chunks": [1, 2, 40, 1, 1, 30, 15], "at once": [LENGTH]}
SCALES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"query_scale": ba.ScalableSoftmax(4, 0.7).double()},
    "content scaled": {"query_scale": ba.MistralScaling(4, length=20), "scale_prior": False},
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_is_attention_over_the_whole_sequence(prior: str, sizes: str, padded: bool) -> None:
    made, padding = sinks(PRIORS[prior]()), torch.tensor([0, 5]) if padded else None
    for kv_heads, settings in zip((4, 2, 1), SCALES.values(), strict=True):
        q, k, v = tokens(4, kv_heads)
        cache = ba.LayerCache(made, tolerance=1e-9, limits=EARLY, rollback=2, **settings)
        if padding is not None:
            cache.pad_left(padding)
        out = fed(cache, q, k, v, SIZES[sizes])
        torch.testing.assert_close(out, whole(q, k, v, made, padding, **settings), rtol=1e-6, atol=1e-6)
        assert cache.length == LENGTH


def test_what_is_evicted_are_never_the_sinks() -> None:
    made = sinks(ba.Window(4, 6))
    q, k, _ = tokens(4, 4, size=LENGTH)
    values = torch.eye(LENGTH, dtype=torch.float64).expand(2, 4, -1, -1)
    cache = ba.LayerCache(made, limits=EARLY, rollback=0, content_spread=100.0)
    cache.pad_left([0, 5])
    weights = fed(cache, q, k, values, [1] * LENGTH)[:, :, -1]
    seen = torch.zeros(2, 4, LENGTH, dtype=torch.bool)
    seen[..., -6:] = True
    seen[0, :, :COUNT], seen[1, :, 5 : 5 + COUNT] = True, True
    assert torch.equal(weights > 0, seen)
    assert cache.spans == [6] * 4
    assert cache.first > LENGTH - 10
    plain = ba.LayerCache(made.prior, limits=EARLY, rollback=0, content_spread=100.0)  # type: ignore[arg-type]
    fed(plain, q, k, values, [1] * LENGTH)
    assert cache.bytes == plain.bytes + 2 * 2 * 4 * COUNT * LENGTH * 8
    assert cache.full_bytes == plain.full_bytes


@pytest.mark.parametrize("crop", [0, 1, 2, 4, 40])
def test_tokens_that_are_taken_back_are_forgotten_as_sinks_too(crop: int) -> None:
    made = sinks(ba.Laplace(4, [0.5] * 4))
    q, k, v = tokens(4, 2)
    cache = ba.LayerCache(made)
    cache.pad_left([0, 2])
    fed(cache, q, k, v, [1] * 50)
    cache.crop(crop)
    other = [torch.cat([x[:, :, :crop], torch.randn_like(x[:, :, crop:])], 2) for x in (q, k, v)]
    expected = whole(*other, made, torch.tensor([0, 2]))[:, :, crop:]
    torch.testing.assert_close(fed(cache, *other, [1, 1, 30], crop), expected[:, :, :32])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_by_itself_from_any_position(copied: Any) -> None:
    made = sinks(ba.Window(4, 9))
    q, k, v = tokens(4, 2)
    for position in (1, 2, 60):
        cache = ba.LayerCache(made, limits=EARLY)
        fed(cache, q, k, v, [1] * position)
        other = copied(cache)
        assert (other.prior is made) == (copied is copy.deepcopy)
        different = [torch.cat([x[:, :, :position], torch.randn_like(x[:, :, position:])], 2) for x in (q, k, v)]
        rest = [1] * (LENGTH - position)
        torch.testing.assert_close(
            fed(other, *different, rest, position), whole(*different, made, None)[:, :, position:]
        )
        torch.testing.assert_close(fed(cache, q, k, v, rest, position), whole(q, k, v, made, None)[:, :, position:])


def test_sequences_that_are_reordered_take_their_sinks_with_them() -> None:
    made, padding = sinks(ba.Window(4, 9)), torch.tensor([0, 5])
    q, k, v = tokens(4, 2)
    for position in (4, 60):
        cache = ba.LayerCache(made, limits=EARLY)
        cache.pad_left(padding)
        fed(cache, q, k, v, [1] * position)
        index = torch.tensor([1, 0, 1])
        cache.reorder(index)
        expected = whole(q[index], k[index], v[index], made, padding[index])[:, :, position:]
        torch.testing.assert_close(
            fed(cache, q[index], k[index], v[index], [1] * (LENGTH - position), position), expected
        )


def test_an_error_leaves_the_sinks_as_they_were() -> None:
    made = sinks(ba.Laplace(4))
    q, k, v = tokens(4, 2)
    cache = ba.LayerCache(made)
    fed(cache, q, k, v, [2])
    before, held = contents(cache), cache._state.sinks
    broken = k.clone()
    broken[0, 0, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        fed(cache, q, broken, v, [3], 2)
    assert contents(cache) == before
    assert cache._state.sinks is held


def test_prefill_reads_a_prompt_with_sinks_in_chunks() -> None:
    made, padding = sinks(ba.Window(4, 9)), torch.tensor([0, 7])
    states = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    projections = torch.randn(3, 4, 8, 8, dtype=torch.float64) / 4
    cache = ba.LayerCache(made, limits=EARLY)

    def project(x: Tensor) -> list[Tensor]:
        return [x.unsqueeze(1) @ projection for projection in projections]

    def decoder(part: Tensor, num_rows: int) -> Tensor:
        q, k, v = project(part)
        return cache.attend(q[:, :, q.shape[2] - num_rows :], k, v).transpose(1, 2)

    out = ba.prefill(decoder, [cache], states, last=20, chunk=16, padding=padding)
    expected = whole(*project(states), made, padding)[:, :, -20:]
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_exact_as_without_a_cache(dtype: torch.dtype) -> None:
    made = sinks(ba.Laplace(4, [0.1] * 4)).float()
    q, k, v = (x.to(dtype) for x in tokens(4, 2))
    exact = whole(q.double(), k.double(), v.double(), made, None)
    without = ba.bayesian_attention(q, k, v, made)
    out = fed(ba.LayerCache(made), q, k, v, [1] * LENGTH)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= 2 * (without.double() - exact).norm() + 1e-6 * exact.norm()


def test_values_may_have_another_size_than_keys() -> None:
    made = sinks(ba.Laplace(4, [0.1] * 4))
    q, k, v = tokens(4, 2)
    v = v[..., :5]
    out = fed(ba.LayerCache(made), q, k, v, [1] * LENGTH)
    torch.testing.assert_close(out, whole(q, k, v, made, None))


def test_a_changed_log_prior_of_sinks_is_noticed() -> None:
    made = sinks(ba.Laplace(4))
    q, k, v = tokens(4, 2)
    cache = ba.LayerCache(made)
    fed(cache, q, k, v, [5])
    with torch.no_grad():
        made.log_prior[1, 1] += 1.0
    with pytest.raises(ValueError, match="the prior or the query scale changed"):
        fed(cache, q, k, v, [5], 5)


CONDITIONED = {
    "gaussian": lambda: ba.ConditionedGaussian(4, 6, hidden=5),
    "profiles in a window": lambda: ba.ProfileBank(4, 6, rank=3, extent=9) * ba.Window(4, 14),
}


@pytest.mark.parametrize("family", CONDITIONED)
@pytest.mark.parametrize("sizes", SIZES)
def test_sinks_over_a_conditioned_prior_are_kept_too(family: str, sizes: str) -> None:
    made, padding = ba.Sinks(CONDITIONED[family](), COUNT, init=0.5).double(), torch.tensor([0, 5])
    q, k, v = tokens(4, 2)
    states = torch.randn(2, LENGTH, 6, dtype=torch.float64)
    cache = ba.LayerCache(made, limits=EARLY, rollback=2)
    cache.pad_left(padding)
    ids = -(torch.arange(LENGTH) < padding[:, None]).long()
    expected = ba.bayesian_attention(q, k, v, made.given(states), document_ids=ids, implementation="reference")
    first = 0
    for size in SIZES[sizes]:
        part = slice(first, first + size)
        out = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], made.prior(states[:, part]))
        torch.testing.assert_close(out, expected[:, :, part], rtol=1e-6, atol=1e-6)
        first += size
    assert cache.spans == [14 if "window" in family else None] * 2
