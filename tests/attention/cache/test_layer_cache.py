"""The pruning cache answers as if it kept everything, or raises an error."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bayesattn as ba
from bayesattn.attention.cache.spans import SpanLimits

TOLERANCE = 1e-3


# Evicts from sequences short enough for a test.
EARLY = SpanLimits(least_kept=24, least_freed=8, horizon=512)


@dataclass
class Run:
    """Inputs whose values are unit vectors, so that the output of attention is the posterior itself."""

    q: Tensor
    k: Tensor
    v: Tensor
    prior: ba.Prior
    scale: ba.ScalableSoftmax | None = None
    scale_prior: bool = True
    padding: Tensor | None = None

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def all_at_once(self) -> Tensor:
        ids = None
        if self.padding is not None:
            ids = torch.where(torch.arange(self.length) < self.padding[:, None], -1, 0)
        with torch.no_grad():
            return ba.bayesian_attention(
                self.q, self.k, self.v, self.prior, query_scale=self.scale, scale_prior=self.scale_prior,
                document_ids=ids, implementation="reference",
            )  # fmt: skip

    def cache(self, **settings: Any) -> ba.LayerCache:
        settings = {"tolerance": TOLERANCE, "rollback": 4, "limits": EARLY, **settings}
        cache = ba.LayerCache(self.prior, query_scale=self.scale, scale_prior=self.scale_prior, **settings)
        if self.padding is not None:
            cache.pad_left(self.padding)
        return cache

    def feed(self, cache: ba.LayerCache, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        return cache.attend(self.q[:, :, part], self.k[:, :, part], self.v[:, :, part], position=start)


def make(
    n: int, prior: ba.Prior, *, kv_heads: int | None = None, batch: int = 2, size: float = 1.0, **rest: Any
) -> Run:
    heads = prior.num_heads
    q = size * torch.randn(batch, heads, n, 4, dtype=torch.float64)
    k = size * torch.randn(batch, kv_heads or heads, n, 4, dtype=torch.float64)
    return Run(q, k, torch.eye(n, dtype=torch.float64).expand(batch, kv_heads or heads, -1, -1), prior, **rest)


def total_variation(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().sum(-1).max().item() / 2


def local(*scales: float) -> ba.Prior:
    return ba.GeneralizedGaussian.from_shape([1.0] * len(scales), list(scales))


def mixed() -> ba.Prior:
    return ba.GeneralizedGaussian.from_shape([1.0, 1.0, -0.5, 0.7], [1.0, 2.0, 3.0, 0.5])


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, list[int]]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    heads = draw(st.sampled_from([2, 4]))
    shape = st.tuples(st.sampled_from([-0.7, 0.5, 1.0, 1.0, 1.0, 2.0]), st.sampled_from([0.3, 1.0, 3.0]))
    shapes = draw(st.lists(shape, min_size=heads, max_size=heads))
    prior: ba.Prior = ba.GeneralizedGaussian.from_shape(*zip(*shapes, strict=True))  # type: ignore[arg-type]
    if draw(st.integers(0, 3)) == 0:
        prior = prior * ba.Window(heads, draw(st.sampled_from([1, 9, 40])))
    n = draw(st.integers(1, 160))
    scale = draw(st.sampled_from([None, None, 0.0, 0.3, 1.0, -0.5]))
    module = None
    if scale is not None:
        module = ba.ScalableSoftmax(heads)
        torch.nn.init.constant_(module.s, scale)
    padding = draw(st.sampled_from([None, None, [0, 5], [7, 1]]))
    run = make(
        n,
        prior,
        kv_heads=draw(st.sampled_from([heads, heads // 2])),
        size=draw(st.sampled_from([0.3, 1.0, 2.0])),
        scale=module,
        scale_prior=draw(st.booleans()),
        padding=None if padding is None else torch.tensor(padding),
    )
    return run, draw(st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=200))


@settings(max_examples=80, deadline=None)
@given(runs())
def test_tokens_and_chunks_give_the_posterior_of_one_pass_or_an_error(case: tuple[Run, list[int]]) -> None:
    run, chunks = case
    whole, cache, start = run.all_at_once(), run.cache(), 0
    for size in [*chunks, run.length]:
        stop = min(run.length, start + size)
        if stop == start:
            break
        try:
            part = run.feed(cache, start, stop)
        except ValueError:
            with pytest.raises(ValueError, match="content_spread"):
                run.feed(cache, start, stop)
            return
        assert total_variation(part, whole[:, :, start:stop]) <= TOLERANCE + 1e-9
        start = stop
    assert cache.bytes <= 2.5 * cache.full_bytes + 64 * 2 * 8 * (4 + run.length) * run.k.shape[1] * len(run.k)


@pytest.mark.parametrize("scale", [None, "scaled", "content only"])
def test_local_heads_evict_and_others_keep_everything(scale: str | None) -> None:
    torch.manual_seed(0)
    module = None if scale is None else ba.ScalableSoftmax(4)
    run = make(400, mixed(), size=0.4, scale=module, scale_prior=scale != "content only")
    cache = run.cache()
    whole = run.all_at_once()
    for start in range(0, 400, 10):
        assert total_variation(run.feed(cache, start, start + 10), whole[:, :, start : start + 10]) <= TOLERANCE
    spans = cache.spans
    assert spans[2] is None
    assert all(span is not None and span < 200 for span in (spans[0], spans[1]))
    assert cache.bytes < cache.full_bytes
    assert "key heads bounded" in str(cache)


def test_a_head_is_bounded_only_if_all_query_heads_that_share_it_are() -> None:
    torch.manual_seed(0)
    prior = ba.GeneralizedGaussian.from_shape([1.0, 1.0, 1.0, -0.5], [1.0, 2.0, 1.0, 3.0])
    run = make(300, prior, kv_heads=2)
    cache = run.cache()
    run.feed(cache, 0, 300)
    assert cache.spans[0] is not None
    assert cache.spans[1] is None


def test_spans_shrink_with_the_query_scale_and_grow_if_it_leaves_the_prior_alone() -> None:
    spans = {}
    for scale_prior in (True, False):
        for length in (64, 500):
            torch.manual_seed(0)
            run = make(length, local(2.0), scale=ba.ScalableSoftmax(1), scale_prior=scale_prior)
            cache = run.cache(content_spread=6.0)
            run.feed(cache, 0, length)
            spans[scale_prior, length] = cache.spans[0] or 10**9
    assert spans[True, 500] < spans[True, 64]
    assert spans[False, 500] >= spans[False, 64]


def test_a_tail_that_never_ends_is_never_evicted() -> None:
    torch.manual_seed(0)
    run = make(600, ba.KerpleLog(2))
    cache = run.cache()
    run.feed(cache, 0, 600)
    assert cache.spans == [None, None]


def test_a_query_beyond_the_spread_raises_and_the_cache_is_as_before() -> None:
    torch.manual_seed(0)
    run = make(300, local(1.0, 1.0))
    run.q[:, :, 299] *= 1e4
    cache = run.cache()
    whole = run.all_at_once()
    run.feed(cache, 0, 290)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"position 290 or after .* are evicted.* content_spread=\d+ or more"):
            run.feed(cache, 290, 300)
    assert total_variation(run.feed(cache, 290, 299), whole[:, :, 290:299]) <= TOLERANCE


@pytest.mark.parametrize("growth", [0.005, 0.02, 0.1])
def test_queries_that_grow_are_answered_right_or_raise(growth: float) -> None:
    torch.manual_seed(0)
    errors = 0
    for _ in range(5):
        run = make(300, local(1.0, 2.0, 4.0), size=0.5)
        run.q *= (growth * torch.arange(300)).exp()[:, None].clamp(max=30.0)
        cache, whole = run.cache(rollback=0), run.all_at_once()
        for position in range(300):
            try:
                part = run.feed(cache, position, position + 1)
            except ValueError:
                errors += 1
                break
            assert total_variation(part, whole[:, :, position, None]) <= TOLERANCE + 1e-9
    assert errors == 0 or growth > 0.005


def test_a_span_that_grew_does_not_cover_what_was_evicted_before() -> None:
    torch.manual_seed(0)
    run = make(300, local(2.0))
    cache = run.cache(rollback=0)
    run.feed(cache, 0, 250)
    certificate, storage = cache._state.certificate, cache._state.storage
    (store,) = storage.stores
    assert certificate is not None
    planned = certificate.planned_spread
    assert planned is not None
    certificate.planned_spread = 4 * planned  # as after a new plan
    storage.set_spans(certificate.spans(fewest_visible=250))
    assert store.span is not None
    assert store.first > 250 - store.span + 1
    run.q[:, :, 250] *= 3 * planned / (run.q[:, :, 250].norm(dim=-1).max() * run.k.norm(dim=-1).max() / 2)
    with pytest.raises(ValueError, match="are evicted"):
        run.feed(cache, 250, 251)


def test_a_query_beyond_the_plan_is_answered_if_what_is_gone_is_far_enough() -> None:
    torch.manual_seed(0)
    run = make(300, ba.Window(2, 8))
    run.q[:, :, 299] *= 1e4
    cache = run.cache()
    run.feed(cache, 0, 299)
    assert total_variation(run.feed(cache, 299, 300), run.all_at_once()[:, :, 299:]) <= TOLERANCE


def test_crop_takes_tokens_back_and_says_when_it_cannot() -> None:
    torch.manual_seed(0)
    run = make(300, mixed(), scale=ba.ScalableSoftmax(4))
    cache, whole = run.cache(rollback=20), run.all_at_once()
    run.feed(cache, 0, 300)
    cache.crop(280)
    assert cache.length == 280
    assert total_variation(run.feed(cache, 280, 300), whole[:, :, 280:]) <= TOLERANCE
    with pytest.raises(ValueError, match=r"cannot crop to 100 positions: keys before .* rollback=200 or more"):
        cache.crop(100)
    with pytest.raises(ValueError, match="cannot crop to 301 positions; the cache has 300"):
        cache.crop(301)
    assert cache.length == 300


def test_beams_continue_the_sequences_of_their_index() -> None:
    torch.manual_seed(0)
    run = make(200, mixed(), batch=3, padding=torch.tensor([0, 3, 9]))
    cache = run.cache()
    run.feed(cache, 0, 150)
    index = torch.tensor([2, 2, 0, 1])
    cache.reorder(index)
    run = Run(run.q[index], run.k[index], run.v[index], run.prior, padding=torch.tensor([9, 9, 0, 3]))
    whole = run.all_at_once()
    assert cache.batch == 4
    for position in range(150, 200):
        assert total_variation(run.feed(cache, position, position + 1), whole[:, :, position, None]) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_at_a_time_in_low_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 200, 16).to(dtype)
    scale = ba.ScalableSoftmax(4)
    exact = ba.bayesian_attention(*(x.double() for x in (q, k, v)), mixed(), query_scale=scale).detach()
    cache = ba.LayerCache(mixed(), query_scale=scale, limits=EARLY)
    out = torch.cat([cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(200)], 2)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=16 * torch.finfo(dtype).eps, rtol=1e-2)


def test_one_token_at_a_time_among_many_hidden_keys() -> None:
    torch.manual_seed(0)
    prior, scale = ba.Window(4, [3, 9, 40, 3000]) * ba.Laplace(4, [0.01] * 4), ba.ScalableSoftmax(4)
    q, k, v = torch.randn(3, 2, 4, 2100, 16)
    padding = torch.tensor([0, 1200])
    cache = ba.LayerCache(prior, query_scale=scale, tolerance=0.0, rollback=2100, limits=EARLY)  # keeps all
    cache.pad_left(padding)
    cache.attend(*(x[:, :, :2000] for x in (q, k, v)))
    out = torch.cat([cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(2000, 2100)], 2)
    for sequence, first in enumerate(padding.tolist()):
        seen = [x[sequence : sequence + 1, :, first:].double() for x in (q, k, v)]
        exact = ba.bayesian_attention(*seen, prior, query_scale=scale, implementation="reference")
        torch.testing.assert_close(out[sequence : sequence + 1].double(), exact[:, :, -100:], atol=1e-5, rtol=1e-4)


def test_queries_of_the_last_tokens_only() -> None:
    torch.manual_seed(0)
    run = make(100, mixed())
    cache, whole = run.cache(), run.all_at_once()
    none = cache.attend(run.q[:, :, :0], run.k[:, :, :60], run.v[:, :, :60])
    assert none.shape == (2, 4, 0, 100)
    out = cache.attend(run.q[:, :, 97:], run.k[:, :, 60:], run.v[:, :, 60:])
    assert total_variation(out, whole[:, :, 97:]) <= TOLERANCE


def test_update_returns_what_is_kept_and_where_it_starts() -> None:
    k = torch.randn(1, 2, 100, 4)
    cache = ba.LayerCache(ba.Window(2, [8, 16]), same_positions=True, content_spread=0.0, rollback=0, limits=EARLY)
    kept, _, first = cache.update(k, k)
    assert first == 0
    torch.testing.assert_close(kept, k)
    kept, _, first = cache.update(k[:, :, :1], k[:, :, :1])
    assert first == 85  # 15 before it, and itself
    torch.testing.assert_close(kept[:, :, :-1], k[:, :, 85:])
    with pytest.raises(ValueError, match="same_positions=True"):
        ba.LayerCache(ba.Window(2, 8)).update(k, k)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 1.0}, r"tolerance is 1.0; it must be a number in \[0, 1\)"),
        ({"tolerance": -0.1}, r"tolerance is -0.1; it must be a number in \[0, 1\)"),
        ({"content_spread": -1.0}, "content_spread is -1.0; it must be a number of nats, at least 0"),
        ({"content_spread": math.inf}, "content_spread is inf; it must be a number of nats, at least 0"),
        ({"rollback": -1}, "rollback is -1; it must be a number of tokens, at least 0"),
        ({"prior": torch.zeros(2, 4)}, "prior is a Tensor; a cache needs the layer's Prior"),
    ],
    ids=str,
)
def test_wrong_settings_get_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ba.LayerCache(**{"prior": local(1.0), **settings})


@pytest.mark.parametrize(
    ("shapes", "position", "message"),
    [
        ((2, 2, 2, 2), 12, "start at position 12 and the cache has 10 positions; they must follow"),
        ((2, 2, 2, 2), 5, "start at position 5 "),
        ((1, 2, 1, 1), None, "the cache holds 2 sequences .* and the new tokens are 1"),
        ((2, 2, 2, 1), None, "q has 2 tokens and k 1; queries are of the new tokens only"),
        ((2, 4, 2, 2), None, "the prior has 2 heads, q 4 and k 2; the first two must be equal"),
    ],
    ids=["a gap", "again", "batch", "queries", "heads"],
)
def test_tokens_that_do_not_follow_get_one_sentence(
    shapes: tuple[int, int, int, int], position: int | None, message: str
) -> None:
    run = make(40, local(1.0, 2.0))
    cache = run.cache()
    run.feed(cache, 0, 10)
    batch, heads, queries, keys = shapes
    q = torch.zeros(batch, heads, queries, 4, dtype=torch.float64)
    k, v = (torch.zeros(batch, 2, keys, size, dtype=torch.float64) for size in (4, 40))
    with pytest.raises(ValueError, match=message):
        cache.attend(q, k, v, position=position)
    assert cache.length == 10


@pytest.mark.parametrize(
    ("positions", "padding", "message"),
    [
        (10, [1, 0], "the cache has 10 positions; padding must be set while it is empty"),
        (0, [-1, 0], r"padding is \[-1, 0\]; one number of positions, at least 0, per sequence"),
        (0, [0.5, 0.5], "one number of positions, at least 0, per sequence"),
        (0, [[1, 0]], "one number of positions, at least 0, per sequence"),
    ],
    ids=str,
)
def test_wrong_padding_gets_one_sentence(positions: int, padding: Any, message: str) -> None:
    run = make(40, local(1.0, 2.0))
    cache = run.cache()
    if positions:
        run.feed(cache, 0, positions)
    with pytest.raises(ValueError, match=message):
        cache.pad_left(padding)


def test_padding_of_another_batch_is_noticed() -> None:
    run = make(40, local(1.0, 2.0))
    cache = run.cache()
    cache.pad_left([1, 0, 4])
    with pytest.raises(ValueError, match="padding is set for 3 sequences and the batch has 2"):
        run.feed(cache, 0, 10)


@pytest.mark.parametrize("change", ["replaced", "trained", "scale"])
def test_a_prior_that_changes_under_a_live_cache_is_noticed(change: str) -> None:
    torch.manual_seed(0)
    run = make(40, local(1.0, 2.0), scale=ba.ScalableSoftmax(2))
    cache = run.cache()
    run.feed(cache, 0, 10)
    if change == "replaced":
        cache.prior = local(3.0, 4.0)
    else:
        parameters = (run.prior if change == "trained" else run.scale).parameters()  # type: ignore[union-attr]
        with torch.no_grad():
            next(iter(parameters)).add_(0.1)
    with pytest.raises(ValueError, match="changed since the cache was filled"):
        run.feed(cache, 10, 12)
    cache.reset()
    run.feed(cache, 0, 10)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_that_is_made_in_inference_mode_goes_on(copied: Callable[[ba.LayerCache], ba.LayerCache]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    prior = ba.Laplace(2, slopes=[1.0, 0.5])
    expected = ba.bayesian_attention(q, k, v, prior)
    cache = ba.LayerCache(prior)
    with torch.inference_mode():
        cache.attend(q[:, :, :7], k[:, :, :7], v[:, :, :7])
        other = copied(cache)
        inside = other.attend(q[:, :, 7:8], k[:, :, 7:8], v[:, :, 7:8])
    outside = other.attend(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:])
    torch.testing.assert_close(torch.cat([inside, outside], 2), expected[:, :, 7:])
