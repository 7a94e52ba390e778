"""After any error the cache is what it was, and what it cannot compute it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba
from bayesattn.attention.cache import state as state_module
from bayesattn.attention.cache.layer_cache import unchanged_on_error
from bayesattn.errors import NotFiniteError
from tests.attention.cache.sequences import COPIES, EARLY, Failing, contents, dense_posterior

N = 200


def prior_of_several_spans() -> ba.Prior:
    return ba.Laplace(4, [2.0, 2.0, 0.1, 0.1]) * ba.Window(4, [9, 9, 100, 100])


def filled(positions: int = 150, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[ba.LayerCache, Tensor]:
    """A cache whose heads are in several stores, and x of which it has the first `positions`."""
    x = torch.randn(1, 4, N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    cache = ba.LayerCache(prior_of_several_spans(), **{"limits": EARLY, "rollback": 4, **settings})
    first = x[:, :, :positions]
    cache.attend(first, first, first)
    return cache, x


def exact(x: Tensor, last: int, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """What full attention gives at the last positions of x."""
    q, k = x if q is None else q, x if k is None else k
    return ba.bayesian_attention(q[:, :, -last:], k, x, prior_of_several_spans(), implementation="reference")


def test_heads_in_several_stores_are_as_before_after_a_wrong_number_of_heads() -> None:
    cache, x = filled()
    assert len(cache._state.storage.stores) == 2
    before, new = contents(cache), x[:, :, 150:160]
    with pytest.raises(ValueError, match="the cache holds"):
        cache.attend(new, new[:, :2], new[:, :2])
    assert contents(cache) == before
    torch.testing.assert_close(cache.attend(new, new, new), exact(x[:, :, :160], 10), atol=1e-5, rtol=0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("added", [0, 2])
def test_tokens_after_some_that_were_taken_back_do_not_overwrite_what_an_error_restores(
    added: int, nested: bool
) -> None:
    cache, x = filled()
    before = contents(cache)

    def take_back_and_fail(other: Tensor) -> None:
        with unchanged_on_error([cache]):
            with unchanged_on_error([cache]) if nested else nullcontext():
                cache.attend(*[other[:, :, :added]] * 3)
                cache.crop(148)
            cache.attend(other, other, other)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_back_and_fail(-x[:, :, 150:])
    assert contents(cache) == before
    new = x[:, :, 150:]
    torch.testing.assert_close(cache.attend(new, new, new), exact(x, N - 150), atol=1e-5, rtol=0)


def test_taking_tokens_back_and_adding_others_moves_no_memory_that_nothing_else_holds() -> None:
    cache, x = filled()
    memory = [store.k.data_ptr() for store in cache._state.storage.stores]
    for _ in range(3):  # as in speculative decoding, where each step is all or nothing
        with unchanged_on_error([cache]):
            cache.crop(148)
        with unchanged_on_error([cache]):
            cache.attend(*[x[:, :, 148:150]] * 3)
    assert [store.k.data_ptr() for store in cache._state.storage.stores] == memory


@pytest.mark.parametrize("step", ["append", "attend", "evict"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), RuntimeError("no")], ids=repr)
def test_an_error_in_the_middle_changes_nothing(
    step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, x = filled()
    before, new = contents(cache), x[:, :, 150:]
    method = getattr(state_module.State, step)

    def fail_at_the_end(*arguments: Any) -> None:
        method(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(state_module.State, step, fail_at_the_end)
        with pytest.raises(type(error)):
            cache.attend(new, new, new)
    assert contents(cache) == before
    torch.testing.assert_close(cache.attend(new, new, new), exact(x, 50), atol=1e-5, rtol=0)


def test_a_query_scale_that_fails_for_longer_texts_than_this_changes_nothing() -> None:
    def scale(visible: Tensor) -> Tensor:
        if len(visible) > 100:  # as in a plan
            raise IndexError("no such length")
        return torch.ones(2, len(visible))

    cache = ba.LayerCache(ba.Laplace(2, [1.0, 1.0]), query_scale=scale, limits=EARLY, content_spread=1.0)
    x = torch.randn(1, 2, 40, 4)
    cache.attend(x[:, :, :20], x[:, :, :20], x[:, :, :20])
    before = contents(cache)
    with pytest.raises(IndexError):
        cache.attend(x[:, :, 20:], x[:, :, 20:], x[:, :, 20:])
    assert contents(cache) == before


def test_a_key_that_is_not_finite_leaves_no_trace() -> None:
    cache, x = filled()
    bad = x[:, :, 150:151].clone()
    bad[0, 0, 0, 0] = torch.nan
    for tokens in ((bad, x), (x, bad)):
        q, k = (each[:, :, :1] for each in tokens)
        with pytest.raises(ValueError, match="has NaN or infinite entries"):
            cache.attend(q, k, k)
    new = x[:, :, 150:]
    torch.testing.assert_close(cache.attend(new, new, new), exact(x, 50), atol=1e-5, rtol=0)


@pytest.mark.parametrize("copy_of", COPIES, ids=lambda each: each.__name__)
def test_a_prompt_is_read_once_and_continued_twice(copy_of: Callable[[ba.LayerCache], ba.LayerCache]) -> None:
    cache, x = filled()
    other = copy_of(cache)
    y = torch.cat([x[:, :, :150], x[:, :, 150:].flip(-1)], 2)
    for start in range(150, N):
        for each, sequence in ((cache, x), (other, y)):
            new = sequence[:, :, start : start + 1]
            out = each.attend(new, new, new, position=start)
            torch.testing.assert_close(out, exact(sequence[:, :, : start + 1], 1), atol=1e-5, rtol=0)


def test_a_deep_copy_shares_the_modules_of_the_layer() -> None:
    scale = ba.ScalableSoftmax(4)
    cache, _ = filled(query_scale=scale)
    other = copy.deepcopy(cache)
    assert other.prior is cache.prior
    assert other.query_scale is scale
    assert other._state.certificate is not None
    assert other._state.certificate.prior is cache.prior


def test_a_model_that_is_copied_with_its_cache_has_a_prior_of_its_own() -> None:
    class Layer(nn.Module):
        def __init__(self, cache: ba.LayerCache) -> None:
            super().__init__()
            self.prior, self.cache = cache.prior, cache

    cache, x = filled()
    cache.reset()
    cache.prior.get_buffer("first.slopes").mul_(1)  # a change that autograd counts, from 0 again in a copy
    cache.attend(x[:, :, :150], x[:, :, :150], x[:, :, :150])
    layer = copy.deepcopy(Layer(cache))
    assert layer.cache._state.snapshot is not None
    assert layer.cache._state.snapshot.versions == [x._version for x in layer.prior.state_dict().values()]
    assert layer.cache.prior is layer.prior
    assert layer.prior is not cache.prior
    layer.cache.attend(x[:, :, 150:], x[:, :, 150:], x[:, :, 150:])


@pytest.mark.parametrize("module", ["prior", "scale"])
@pytest.mark.parametrize("through", ["data", "load_state_dict", "inference mode", "no_grad", "dtype", "deepcopy"])
def test_a_layer_that_changed_is_noticed(module: str, through: str) -> None:
    prior, scale = ba.Laplace(4, [1.0, 1.0, 2.0, 2.0]), ba.ScalableSoftmax(4)
    chosen: nn.Module = prior if module == "prior" else scale
    cache = ba.LayerCache(prior, query_scale=scale)
    x = torch.randn(1, 4, 10, 4)
    cache.attend(x, x, x)
    tensor = [*chosen.parameters(), *chosen.buffers()][0]
    if through == "load_state_dict":
        chosen.load_state_dict({name: value + 1 for name, value in chosen.state_dict().items()})
    elif through == "inference mode":
        with torch.inference_mode():
            tensor.add_(1)
    elif through == "no_grad":
        with torch.no_grad():
            tensor.mul_(2)
    elif through == "dtype":
        chosen.bfloat16()
    else:
        tensor.data.add_(1)
        cache = copy.deepcopy(cache) if through == "deepcopy" else cache
    before = contents(cache)
    with pytest.raises(ValueError, match="the prior or the query scale changed since the cache was filled; reset it"):
        cache.attend(x, x, x)
    assert contents(cache) == before
    cache.reset()
    assert cache.attend(x, x, x).isfinite().all()


@pytest.mark.parametrize("module", ["prior", "scale"])
@pytest.mark.parametrize("start", [20, 1020])
def test_single_tokens_have_the_answers_of_the_first_prior_until_a_change_is_noticed(module: str, start: int) -> None:
    prior, scale = ba.Laplace(2, [0.1, 0.2]), ba.ScalableSoftmax(2)
    first_prior, first_scale = copy.deepcopy(prior), copy.deepcopy(scale)
    cache = ba.LayerCache(prior, query_scale=scale)
    x = torch.randn(1, 2, start + 40, 4, dtype=torch.float64)
    cache.attend(x[:, :, :start], x[:, :, :start], x[:, :, :start])
    changed = {"prior": prior.slopes, "scale": scale.s}[module]
    changed.data.mul_(2)
    noticed = ""
    for position in range(start, start + 40):  # 1,024 is where a table of the log-prior ends
        new, seen = x[:, :, position : position + 1], x[:, :, : position + 1]
        before = contents(cache)
        try:
            out = cache.attend(new, new, new)
        except ValueError as error:
            noticed = str(error)
            break
        exact = ba.bayesian_attention(new, seen, seen, first_prior, query_scale=first_scale, implementation="reference")
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=0)
    assert "changed since the cache was filled" in noticed
    assert contents(cache) == before
    assert position <= start + 32


@pytest.mark.parametrize("inference", [True, False])
def test_a_cache_filled_in_inference_mode_goes_on_outside_and_the_other_way_round(inference: bool) -> None:
    x = torch.randn(2, 4, N, 4, dtype=torch.float64)
    cache = ba.LayerCache(prior_of_several_spans(), limits=EARLY)
    for start in range(0, N, 20):
        new = x[:, :, start : start + 20]
        with torch.inference_mode(inference == (start % 40 == 0)):
            out = cache.attend(new, new, new)
            cache.reorder(torch.tensor([0, 1]))
        torch.testing.assert_close(out, exact(x[:, :, : start + 20], 20), atol=1e-5, rtol=0)
    assert contents(copy.deepcopy(cache)) == contents(cache)


def test_autocast_rounds_neither_content_nor_prior() -> None:
    x, prior = torch.randn(1, 2, 80, 4), ba.Laplace(2, [1.0, 0.1])
    cache = ba.LayerCache(prior, limits=EARLY)
    for start in range(80):
        new = x[:, :, start : start + 1]
        with torch.autocast("cpu", torch.bfloat16):
            out = cache.attend(new, new, new)
        seen = x[:, :, : start + 1]
        wanted = ba.bayesian_attention(new, seen, seen, prior, implementation="reference")
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_size", [1e-40, 1.0, 1e3, 3e4, 1e18, 1e37, 1e200])
@pytest.mark.parametrize("k_size", [1e-40, 1.0, 1e3, 3e4, 1e18, 1e37, 1e200])
def test_content_of_any_size_after_eviction_is_right_or_refused(
    dtype: torch.dtype, q_size: float, k_size: float
) -> None:
    cache, x = filled(dtype=dtype)
    limit = torch.finfo(dtype).max / 8
    factors = torch.ones(2, N, 1, dtype=dtype)
    factors[0, 150:], factors[1, 150:] = min(q_size, limit), min(k_size, limit)
    q, k = x * factors[0], x * factors[1]
    for start in range(150, 160):
        now = slice(start, start + 1)
        before = contents(cache)
        try:
            out = cache.attend(q[:, :, now], k[:, :, now], x[:, :, now])
        except ValueError:
            assert contents(cache) == before
            assert max(q_size, k_size) > 1.0
            return
        seen = [each[:, :, : start + 1].double() for each in (x, q, k)]
        wanted = exact(seen[0], 1, *seen[1:])
        assert out.isfinite().all()
        largest_logit = (seen[1][:, :, -1:] @ seen[2].mT).abs().max().item() / 2
        rounding = (
            torch.finfo(dtype).eps + 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest_logit
        )
        assert (out.double() - wanted).abs().max() <= 1e-5 + 64 * rounding


def test_keys_whose_squares_overflow_are_answered_right_if_queries_are_small() -> None:
    _, x = filled(dtype=torch.float32)
    cache, q, k = ba.LayerCache(prior_of_several_spans(), limits=EARLY), x * 1e-25, x * 1e25
    for start in range(0, N, 20):
        now = slice(start, start + 20)
        out = cache.attend(q[:, :, now], k[:, :, now], x[:, :, now])
        wanted = exact(x[:, :, : now.stop].double(), 20, *(each[:, :, : now.stop].double() for each in (q, k)))
        torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)
    assert cache.first > 0


def test_a_sum_that_overflows_on_its_way_to_a_small_number_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 64)
    k = torch.cat([torch.full((1, 1, 1, 32), -2e19), torch.full((1, 1, 1, 32), 2e19)], -1)
    cache = ba.LayerCache(ba.Uniform(1))
    cache.attend(x, x, x)
    with pytest.raises(ValueError, match=r"logits may reach .* at most 1e\+29 is allowed, make them smaller"):
        cache.attend(torch.full_like(x, 1e19), k, x)  # q·k is 0, and half of it more than float32 has


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_whose_mean_overflows_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 100, 4, dtype=dtype)
    cache = ba.LayerCache(ba.Uniform(1))
    before = contents(cache)
    with pytest.raises(ValueError, match="the values are too large: their mean is not finite; make them smaller"):
        cache.attend(x, x, torch.full_like(x, torch.finfo(dtype).max))
    assert contents(cache) == before


@pytest.mark.parametrize("positions", [0, 150])
def test_keys_whose_norms_overflow_are_refused_when_no_query_comes_with_them(positions: int) -> None:
    for settings in ({}, {"same_positions": True}):
        cache, x = filled(positions, **settings)
        before, new = contents(cache), x[:, :, positions : positions + 2]
        huge = torch.full_like(new, 1e308)
        with pytest.raises(NotFiniteError, match="k has norms that are too large for float64; make the keys smaller"):
            cache.update(huge, new) if settings else cache.attend(new[:, :, :0], huge, new)
        assert contents(cache) == before
        if not settings:
            cache.attend(new, new, new)  # tokens after it are answered


def test_norms_beyond_half_precision_are_bounds() -> None:
    x = torch.full((1, 1, 60, 64), 3e4, dtype=torch.float16)  # of a norm of 2.4e5
    small = torch.randn(1, 1, 60, 64).half()
    cache = ba.LayerCache(ba.Laplace(1, [1.0]), limits=EARLY)
    cache.attend(small, x, small)
    assert cache._state.certificate is not None
    assert cache._state.certificate.key_norm.item() == pytest.approx(2.4e5, rel=1e-3)


@pytest.mark.parametrize("change", ["batch", "heads", "size", "dtype", "kind"])
def test_single_tokens_that_fit_do_not_let_others_pass(change: str) -> None:
    cache, x = filled()
    for position in range(150, 153):
        cache.attend(*[x[:, :, position : position + 1]] * 3)
    new = x[:, :, 153:154]
    if change == "batch":
        cache.reorder(torch.tensor([0, 0]))  # now there are two sequences
    wrong = {
        "batch": new, "heads": new[:, :2], "size": new[..., :2], "dtype": new.float(), "kind": new.to_sparse()
    }[change]  # fmt: skip
    before = contents(cache)
    with pytest.raises((TypeError, ValueError)):
        cache.attend(wrong, wrong, wrong)
    assert contents(cache) == before


def test_an_empty_batch_has_an_empty_answer() -> None:
    cache = ba.LayerCache(prior_of_several_spans(), limits=EARLY)
    x = torch.randn(0, 4, 60, 4)
    for _ in range(3):
        assert cache.attend(x, x, x).shape == (0, 4, 60, 4)
    assert cache.length == 180


def test_no_new_tokens_change_nothing() -> None:
    x = torch.randn(1, 4, 0, 4, dtype=torch.float64)
    for cache in (ba.LayerCache(prior_of_several_spans()), filled()[0]):
        before = contents(cache)
        assert cache.attend(x, x, x).shape == (1, 4, 0, 4)
        assert contents(cache) == before
    cache = ba.LayerCache(prior_of_several_spans(), same_positions=True)
    before = contents(cache)
    assert cache.update(x, x)[0].shape == (1, 4, 0, 4)
    assert contents(cache) == before


def test_padding_may_hold_anything() -> None:
    x = torch.randn(2, 4, 60, 4, dtype=torch.float64)
    hidden = torch.arange(60)[:, None] < torch.tensor([0, 35])[:, None, None, None]
    answers = []
    for value in (0.0, torch.nan, torch.inf, 1e300):
        cache = ba.LayerCache(prior_of_several_spans(), limits=EARLY)
        cache.pad_left([0, 35])
        y = x.masked_fill(hidden, value)
        parts = [y[:, :, start : start + 20] for start in (0, 20, 40)]
        answers.append(torch.cat([cache.attend(part, part, part) for part in parts], 2))
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    posterior, _ = dense_posterior(x, x, prior_of_several_spans(), None, True, torch.tensor([0, 35]))
    torch.testing.assert_close(answers[0], posterior[..., :60] @ x, atol=1e-5, rtol=0)


class SeenAgain(ba.Prior):
    """Sees the nearest 8 keys, and those from distance 100 on."""

    def forward(self, distance: Tensor) -> Tensor:
        seen = (distance < 8) | (distance >= 100)
        return torch.zeros(self.num_heads, *distance.shape).masked_fill(~seen, -torch.inf)


def test_keys_that_are_needed_again_beyond_the_horizon_are_missed_before_an_answer_is_wrong() -> None:
    limits = ba.attention.cache.spans.SpanLimits(least_kept=24, horizon=64)
    x = torch.randn(1, 1, 200, 4, dtype=torch.float64)
    attends = ba.LayerCache(SeenAgain(1), content_spread=8.0, limits=limits, rollback=0)
    returns = ba.LayerCache(SeenAgain(1), content_spread=8.0, limits=limits, rollback=0, same_positions=True)
    calls: list[Callable[[Tensor], object]] = [lambda k: attends.attend(k, k, k), lambda k: returns.update(k, k)]
    for cache, call in zip((attends, returns), calls, strict=True):
        for start in range(100):
            call(x[:, :, start : start + 1])
        assert cache.first > 0
        with pytest.raises(ValueError, match="which are evicted"):
            call(x[:, :, 100:101])  # the first query that sees the first key again
        assert cache.length == 100


def test_a_plan_does_not_cover_a_text_that_outgrows_it_in_one_call() -> None:
    limits = ba.attention.cache.spans.SpanLimits(least_kept=24, horizon=64)
    x = torch.randn(1, 1, 200, 4, dtype=torch.float64)
    cache = ba.LayerCache(SeenAgain(1), content_spread=8.0, limits=limits, rollback=0)
    cache.attend(x[:, :, :30], x[:, :, :30], x[:, :, :30])
    assert cache.first > 0
    with pytest.raises(ValueError, match=r"a query at position 199 or after may put .* which are evicted"):
        cache.attend(x[:, :, 199:], x[:, :, 30:], x[:, :, 30:])


def test_crop_takes_rollback_tokens_back_after_a_span_grew() -> None:
    x = torch.randn(1, 2, 100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, :, :60] *= 0.01
    cache = ba.LayerCache(ba.Laplace(2, [1.0, 1.0]), limits=EARLY, rollback=4, tolerance=1e-3)
    narrow = None
    for start in range(64):
        new = x[:, :, start : start + 1] * (1.0 + (start > 58))
        cache.attend(new, new, new)
        narrow = narrow or cache.spans[0]
    assert narrow is not None
    assert (cache.spans[0] or N) > narrow
    cache.crop(60)
    assert cache.length == 60


def test_other_settings_of_a_filled_cache_wait_for_the_next_text() -> None:
    cache, x = filled()
    cache.scale_prior, cache.softmax_scale = False, 7.0
    new = x[:, :, 150:]
    torch.testing.assert_close(cache.attend(new, new, new), exact(x, 50), atol=1e-5, rtol=0)


def test_a_scale_of_another_kind_of_float_is_as_good() -> None:
    x = torch.randn(1, 2, 60, 4)
    answers = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        cache = ba.LayerCache(
            ba.Laplace(2, [1.0, 1.0]), query_scale=lambda n, dtype=dtype: torch.full((2, len(n)), 2.0, dtype=dtype)
        )
        answers.append(torch.cat([cache.attend(each, each, each) for each in x.split(1, 2)], 2))
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0])


def test_the_error_of_the_query_scale_reaches_the_caller() -> None:
    scale = Failing(4, 1.0)
    cache, x = filled(query_scale=scale)
    scale.error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError, match="mine"):
        cache.attend(x[:, :, :1], x[:, :, :1], x[:, :, :1])
