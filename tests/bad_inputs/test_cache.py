"""Bad input of the pruning cache: one sentence, and the cache is what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.attention.cache.spans import SpanLimits
from bayesattn.models.cache import BayesCache, BayesCacheLayer
from tests.attention.cache.sequences import contents
from tests.bad_inputs.rows import Row, check_refused

Tried = Callable[[str, int], None]
NAN, INF = float("nan"), float("inf")
PRIOR = ba.Laplace(4, [0.5, 1.0, 0.5, 1.0])


class WrongShape(ba.Prior):
    def forward(self, distance: Tensor) -> Tensor:
        return torch.zeros(1, *distance.shape)


class NotANumber(ba.Prior):
    def forward(self, distance: Tensor) -> Tensor:
        return torch.full((self.num_heads, *distance.shape), NAN)


def tokens(batch: int = 2, heads: int = 4, number: int = 3, size: int = 8) -> Tensor:
    return torch.randn(batch, heads, number, size, generator=torch.Generator().manual_seed(0))


def filled(positions: int = 20, **settings: Any) -> ba.LayerCache:
    """A cache of 2 sequences with 2 key heads of size 8 and values of size 6."""
    cache = ba.LayerCache(PRIOR, **settings)
    k = tokens(heads=2, number=positions)
    if settings.get("same_positions"):
        cache.update(k, k[..., :6])
    else:
        cache.attend(tokens(number=positions), k, k[..., :6])
    return cache


def with_entry(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[-1, -1, -1, -1] = value
    return x


SETTINGS = [
    Row("prior", None, "prior is a NoneType; a cache needs the layer's Prior"),
    Row("prior", "laplace", "prior is a str; a cache needs the layer's Prior"),
    Row("prior", torch.zeros(4, 9), "prior is a Tensor; a cache needs the layer's Prior"),
    Row("prior", ba.Laplace, "prior is a type; a cache needs the layer's Prior"),
    Row("prior", ba.Sinks(PRIOR).given, "prior is a method; a cache needs the layer's Prior"),
    Row("query_scale", 2.0, "query_scale is a float; a module, a function or None is allowed"),
    Row("query_scale", torch.ones(4), "query_scale is a Tensor; a module, a function or None is allowed"),
    Row("query_scale", "log", "query_scale is a str; a module, a function or None is allowed"),
    Row("scale_prior", 1, "scale_prior is 1; True or False is needed"),
    Row("scale_prior", None, "scale_prior is None; True or False is needed"),
    Row("softmax_scale", "a", "softmax_scale is 'a'; it must be a finite number"),
    Row("softmax_scale", NAN, "softmax_scale is nan; it must be a finite number"),
    Row("softmax_scale", INF, "softmax_scale is inf; it must be a finite number"),
    Row("softmax_scale", torch.tensor(1.0), "softmax_scale is a tensor; a number is needed"),
    Row("softmax_scale", True, "softmax_scale is True; it must be a finite number"),
    Row("tolerance", "a", "tolerance is 'a'; it must be a number in [0, 1)"),
    Row("tolerance", None, "tolerance is None; it must be a number in [0, 1)"),
    Row("tolerance", True, "tolerance is True; it must be a number in [0, 1)"),
    Row("tolerance", -1e-9, "tolerance is -1e-09; it must be a number in [0, 1)"),
    Row("tolerance", 1, "tolerance is 1; it must be a number in [0, 1)"),
    Row("tolerance", 1e300, "tolerance is 1e+300; it must be a number in [0, 1)"),
    Row("tolerance", NAN, "tolerance is nan; it must be a number in [0, 1)"),
    Row("content_spread", "a", "content_spread is 'a'; it must be a number of nats, at least 0"),
    Row("content_spread", -1.0, "content_spread is -1.0; it must be a number of nats"),
    Row("content_spread", NAN, "content_spread is nan; it must be a number of nats"),
    Row("content_spread", INF, "content_spread is inf; it must be a number of nats"),
    Row("content_spread", True, "content_spread is True; it must be a number of nats"),
    Row("content_spread", 10**400, "content_spread is 1000"),
    Row("rollback", 1.5, "rollback is 1.5; it must be a number of tokens, at least 0"),
    Row("rollback", "a", "rollback is 'a'; it must be a number of tokens"),
    Row("rollback", True, "rollback is True; it must be a number of tokens"),
    Row("rollback", None, "rollback is None; it must be a number of tokens"),
    Row("rollback", -1, "rollback is -1; it must be a number of tokens"),
    Row("rollback", INF, "rollback is inf; it must be a number of tokens"),
    Row("rollback", 10**30, "rollback is 1000000000000000000000000000000; it must be"),
    Row("same_positions", "no", "same_positions is 'no'; True or False is needed"),
    Row("same_positions", 0, "same_positions is 0; True or False is needed"),
    Row("limits", None, "limits is None; SpanLimits are needed"),
    Row("limits", {"horizon": 512}, "limits is {'horizon': 512}; SpanLimits are needed"),
    Row("limits", SpanLimits, "SpanLimits are needed"),
]

LIMITS = [
    Row("least_kept", 1.5, "least_kept of limits is 1.5; a whole number from 0 to"),
    Row("least_kept", -1, "least_kept of limits is -1; a whole number from 0 to"),
    Row("least_kept", True, "least_kept of limits is True; a whole number"),
    Row("least_kept", 10**12, "least_kept of limits is 1000000000000; a whole number"),
    Row("horizon", 0, "horizon of limits is 0; a whole number from 1 to"),
    Row("horizon", "a", "horizon of limits is 'a'; a whole number"),
    Row("horizon", 10**12, "horizon of limits is 1000000000000; a whole number"),
    Row("horizon", 512.0, "horizon of limits is 512.0; a whole number"),
    Row("margin", 0.5, "margin of limits is 0.5; a number from 1 to"),
    Row("margin", NAN, "margin of limits is nan; a number from 1 to"),
    Row("margin", INF, "margin of limits is inf; a number from 1 to"),
    Row("margin", "a", "margin of limits is 'a'; a number from 1 to"),
    Row("replan_ratio", 0.0, "replan_ratio of limits is 0.0; a number in (0, 1] is needed"),
    Row("replan_ratio", 1.5, "replan_ratio of limits is 1.5; a number in (0, 1] is needed"),
    Row("replan_ratio", NAN, "replan_ratio of limits is nan; a number in (0, 1]"),
    Row("replan_ratio", None, "replan_ratio of limits is None; a number in (0, 1]"),
]

# Changes of good arguments of `attend` for a cache that is filled.
GOOD = {"q": tokens(), "k": tokens(heads=2), "v": tokens(heads=2, size=6)}
ATTEND = [
    Row("q", None, "q is a NoneType; it must be a tensor"),
    Row("q", GOOD["q"].tolist(), "q is a list; it must be a tensor"),
    Row("q", GOOD["q"].numpy(), "q is a ndarray; it must be a tensor"),
    Row("q", GOOD["q"].to_sparse(), "q is a tensor of the kind sparse_coo; a dense tensor is needed"),
    Row("q", GOOD["q"][0], "q has shape [4, 3, 8]; it must be [batch, heads, tokens, head size]"),
    Row("q", GOOD["q"].double(), "k is torch.float32 on cpu and q is torch.float64 on cpu"),
    Row("q", GOOD["q"].long(), "q is torch.int64; float64, float32, bfloat16 and float16 are allowed"),
    Row("q", tokens(heads=8), "the prior has 4 heads, q 8 and k 2"),
    Row("q", tokens(heads=2), "the prior has 4 heads, q 2 and k 2"),
    Row("q", tokens(heads=3), "q has 3 heads and k 2; the heads of k must divide those of q"),
    Row("q", tokens(number=4), "q has 4 tokens and k 3; queries are of the new tokens only"),
    Row("q", tokens(batch=1), "q has shape [1, 4, 3, 8] and k [2, 2, 3, 8]; batch and head size must agree"),
    Row("q", tokens(size=7), "batch and head size must agree"),
    Row("q", with_entry(GOOD["q"], NAN), "q has NaN or infinite entries; only finite numbers are allowed"),
    Row("q", with_entry(GOOD["q"], INF), "q has NaN or infinite entries"),
    Row("q", with_entry(GOOD["q"], -INF), "q has NaN or infinite entries"),
    Row("q", with_entry(GOOD["q"], 3e38), "logits may reach"),
    Row("k", None, "k is a NoneType; it must be a tensor"),
    Row("k", GOOD["k"][0], "k has shape [2, 3, 8]; it must be [batch, heads, tokens, head size]"),
    Row("k", GOOD["k"].bfloat16(), "k is torch.bfloat16 on cpu and q is torch.float32 on cpu; they must agree"),
    Row("k", GOOD["k"].to("meta"), "k is torch.float32 on meta and q is torch.float32 on cpu; they must agree"),
    Row("k", tokens(heads=1), "k has shape [2, 1, 3, 8] and v [2, 2, 3, 6]; batch, heads and tokens must agree"),
    Row("k", tokens(heads=2, number=2), "batch, heads and tokens must agree"),
    Row("k", with_entry(GOOD["k"], NAN), "k has NaN or infinite entries; only finite numbers are allowed"),
    Row("k", with_entry(GOOD["k"], INF), "k has NaN or infinite entries"),
    Row("k", with_entry(GOOD["k"], 3e38), "logits may reach"),
    Row("v", None, "v is a NoneType; it must be a tensor"),
    Row("v", tokens(heads=2, size=1), "the cache holds [2, 2, 8] and [2, 2, 6]; they must agree"),
    Row("v", tokens(heads=2, size=0), "head size and value size must be at least 1"),
    Row("v", tokens(heads=2, number=1, size=6), "batch, heads and tokens must agree"),
    Row("v", with_entry(GOOD["v"], NAN), "v has NaN or infinite entries; only finite numbers are allowed"),
    Row("v", with_entry(GOOD["v"], -INF), "v has NaN or infinite entries"),
    Row("position", 1.0, "position is 1.0; a whole number, here 20, or None is needed"),
    Row("position", "20", "position is '20'; a whole number, here 20, or None is needed"),
    Row("position", True, "position is True; a whole number"),
    Row("position", -1, "position is -1; a whole number"),
    Row("position", 10**30, "position is 1000000000000000000000000000000; a whole number"),
    Row("position", 19, "the new tokens start at position 19 and the cache has 20 positions"),
    Row("position", 21, "the new tokens start at position 21 and the cache has 20 positions"),
]

# Several arguments at once: good for an empty cache, and not what this one holds.
OTHER_LAYERS = [
    Row("one key head", {"k": tokens(heads=1), "v": tokens(heads=1, size=6)}, "k has [batch, heads, size] [2, 1, 8]"),
    Row("four key heads", {"k": tokens(), "v": tokens(size=6)}, "k has [batch, heads, size] [2, 4, 8]"),
    Row("head size", {"q": tokens(size=1), "k": tokens(heads=2, size=1)}, "k has [batch, heads, size] [2, 2, 1]"),
    Row("batch", {name: x[:1] for name, x in GOOD.items()}, "the cache holds 2 sequences of torch.float32 on cpu"),
    Row("no batch", {name: x[:0] for name, x in GOOD.items()}, "the new tokens are 0 of torch.float32"),
    Row("dtype", {name: x.half() for name, x in GOOD.items()}, "the new tokens are 2 of torch.float16"),
]

UPDATE = [
    Row("k", None, "k is a NoneType; it must be a tensor [batch, heads, tokens, head size]"),
    Row("k", GOOD["k"][0], "k has shape [2, 3, 8]; it must be [batch, heads, tokens, head size]"),
    Row("k", GOOD["k"].to_sparse(), "k is a tensor of the kind sparse_coo"),
    Row("k", GOOD["k"].long(), "k is torch.int64; float64, float32, bfloat16 and float16 are allowed"),
    Row("k", GOOD["k"].double(), "v is torch.float32 on cpu and k is torch.float64 on cpu; they must agree"),
    Row("k", tokens(heads=1), "k has shape [2, 1, 3, 8] and v [2, 2, 3, 6]; batch, heads and tokens must agree"),
    Row("k", tokens(heads=2, size=0), "heads and head size be at least 1"),
    Row("k", tokens(heads=2, size=1), "k has [batch, heads, size] [2, 2, 1]"),
    Row("k", with_entry(GOOD["k"], NAN), "k has NaN or infinite entries"),
    Row("v", "v", "v is a str; it must be a tensor [batch, heads, tokens, head size]"),
    Row("v", tokens(heads=2, size=1), "v [2, 2, 1], and the cache holds [2, 2, 8] and [2, 2, 6]; they must agree"),
    Row("v", with_entry(GOOD["v"], INF), "v has NaN or infinite entries"),
    Row("position", 1.0, "position is 1.0; a whole number"),
    Row("position", 3, "the new tokens start at position 3 and the cache has 20 positions"),
]

# Of a filled cache: the method, its argument, the sentence.
METHODS = [
    Row("crop", 1.5, "cannot crop to 1.5 positions; the cache has 20"),
    Row("crop", True, "cannot crop to True positions; the cache has 20"),
    Row("crop", "a", "cannot crop to 'a' positions; the cache has 20"),
    Row("crop", None, "cannot crop to None positions"),
    Row("crop", NAN, "cannot crop to nan positions"),
    Row("crop", torch.tensor(3), "cannot crop to tensor(3) positions"),
    Row("crop", -1, "cannot crop to -1 positions"),
    Row("crop", 21, "cannot crop to 21 positions; the cache has 20"),
    Row("crop", 10**30, "cannot crop to 1000000000000000000000000000000 positions"),
    Row("reserve", "a", "length is 'a'; a whole number of positions from 0 to"),
    Row("reserve", 1.5, "length is 1.5; a whole number of positions"),
    Row("reserve", True, "length is True; a whole number of positions"),
    Row("reserve", -1, "length is -1; a whole number of positions"),
    Row("reserve", 10**18, "length is 1000000000000000000; a whole number of positions"),
    Row("reorder", None, "index is NoneType; a tensor of integers"),
    Row("reorder", [0, 1], "index is list; a tensor of integers"),
    Row("reorder", torch.tensor([0.0, 1.0]), "index is torch.float32; a tensor of integers"),
    Row("reorder", torch.tensor([True, False]), "index is torch.bool; a tensor of integers"),
    Row("reorder", torch.tensor([0, 2]), "index reaches from 0 to 2; the cache has 2 sequences, counted from 0"),
    Row("reorder", torch.tensor([-1, 0]), "index reaches from -1 to 0; the cache has 2 sequences"),
    Row("reorder", torch.tensor([2**62]), "index reaches from 4611686018427387904 to"),
    Row("reorder", torch.tensor([[0, 1]]), "index has shape [1, 2]; one sequence or more, [n], is needed"),
    Row("reorder", torch.tensor(0), "index has shape []; one sequence or more, [n], is needed"),
    Row("reorder", torch.tensor([], dtype=torch.long), "index has shape [0]; one sequence or more"),
    Row("pad_left", [1, 0], "the cache has 20 positions; padding must be set while it is empty"),
]

PADDING = [
    Row("padding", None, "padding is None; one number of positions, at least 0, per sequence is needed"),
    Row("padding", "ab", "padding is 'ab'; one number of positions"),
    Row("padding", 3, "padding is 3; one number of positions"),
    Row("padding", [], "padding is []; one number of positions"),
    Row("padding", [[1, 0]], "padding is [[1, 0]]; one number of positions"),
    Row("padding", [[1], [1, 0]], "padding is [[1], [1, 0]]; one number of positions"),
    Row("padding", [0.5, 1.0], "padding is [0.5, 1.0]; one number of positions"),
    Row("padding", [True, False], "padding is [True, False]; one number of positions"),
    Row("padding", [1j], "padding is [1j]; one number of positions"),
    Row("padding", [NAN], "padding is [nan]; one number of positions"),
    Row("padding", [1, -1], "padding is [1, -1]; one number of positions"),
    Row("padding", [10**30], "padding is [1000000000000000000000000000000]; one number"),
    Row("padding", [2**60], "padding is [1152921504606846976]; one number of positions, at least 0, per sequence"),
    Row("padding", [-1] * 1000, "padding is [-1, -1"),
    Row("padding", torch.tensor([0.5]), "padding is tensor([0.5000]); one number of positions"),
]

X = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0))
PREFILL = [
    Row("decoder", None, "decoder is None; a function is needed"),
    Row("decoder", lambda part, rows: None, "the decoder must give each cache the tokens of its part once"),
    Row("caches", None, "caches are of the type 'NoneType'; a sequence of LayerCaches is needed"),
    Row("caches", [], "caches are of the type 'list'; a sequence of LayerCaches is needed"),
    Row("caches", ["cache"], "caches are of the type 'str'; a sequence of LayerCaches is needed"),
    Row("caches", filled(), "caches are of the type 'LayerCache'; a sequence of LayerCaches is needed"),
    Row("caches", [None, filled()], "caches are of the type 'LayerCache, NoneType'"),
    Row("caches", [filled(), filled(3)], "the caches have [20, 3] positions; they must have the same number"),
    Row("prompt", None, "the prompt is None; a tensor, or a sequence of tensors"),
    Row("prompt", "text", "the prompt is 'text'; a tensor, or a sequence of tensors"),
    Row("prompt", [], "the prompt is []; a tensor, or a sequence of tensors"),
    Row("prompt", [[1, 2], [3, 4]], "the prompt is [[1, 2], [3, 4]]; a tensor, or a sequence of tensors"),
    Row("prompt", [torch.tensor(1)], "the prompt is [tensor(1)]; a tensor, or a sequence of tensors"),
    Row("prompt", X[:, :0], "the prompt has shape [2, 0, 8]; at least one sequence of at least one token is needed"),
    Row("prompt", X[:0], "the prompt has shape [0, 10, 8]; at least one sequence of at least one token is needed"),
    Row("prompt", [X[0, :0]], "the prompt has shape [1, 0, 8]; at least one sequence of at least one token"),
    Row("prompt", X[0, 0], "the prompt has shape [8]; [batch, tokens] or [batch, tokens, size] is needed"),
    Row("prompt", X[None], "the prompt has shape [1, 2, 10, 8]; [batch, tokens] or"),
    Row("prompt", [X[0], X[0, :5]], "the prompts have [5, 10] tokens; pad them on the left"),
    Row("prompt", [X[0], X[1].double()], "shapes, dtypes and devices must agree"),
    Row("prompt", [X[0], X[1, :, :3]], "shapes, dtypes and devices must agree"),
    Row("last", 0, "last is 0 and the prompt has 10 positions; 1 to 10 are allowed"),
    Row("last", 11, "last is 11 and the prompt has 10 positions; 1 to 10 are allowed"),
    Row("last", 1.0, "last is 1.0 and the prompt has 10 positions"),
    Row("last", True, "last is True and the prompt has 10 positions"),
    Row("last", "1", "last is '1' and the prompt has 10 positions"),
    Row("last", 10**30, "last is 1000000000000000000000000000000 and the prompt has 10 positions"),
    Row("chunk", 0, "chunk is 0; it must be at least 1 position"),
    Row("chunk", -5, "chunk is -5; it must be at least 1 position"),
    Row("chunk", 2.5, "chunk is 2.5; it must be at least 1 position"),
    Row("chunk", INF, "chunk is inf; it must be at least 1 position"),
    Row("chunk", None, "chunk is None; it must be at least 1 position"),
    Row("chunk", True, "chunk is True; it must be at least 1 position"),
    Row("padding", [1, 0, 0], "padding is set for 3 sequences and the batch has 2"),
    Row("padding", [1.5, 0], "padding is [1.5, 0]; one number of positions"),
    Row("progress", 3, "progress is 3; a function is needed"),
]

ONE = filled(same_positions=True)
CACHES = [
    Row("caches", None, "caches is None; a sequence of LayerCaches, one per layer, is needed"),
    Row("caches", [], "caches is []; a sequence of LayerCaches"),
    Row("caches", ONE, "a sequence of LayerCaches, one per layer, is needed"),
    Row("caches", [ONE, None], "a sequence of LayerCaches, one per layer, is needed"),
    Row("caches", [ONE, ONE], "caches has one of its 2 caches twice; each layer needs its own"),
]

# Of a filled BayesCache of two layers.
HUGGING_FACE = [
    Row("crop", 3, "crop got 3; the number of tokens to take back is given as a negative number, here from -20 to 0"),
    Row("crop", -21, "crop got -21; the number of tokens to take back"),
    Row("crop", -1.5, "crop got -1.5; the number of tokens to take back"),
    Row("crop", False, "crop got False; the number of tokens to take back"),
    Row("crop", "a", "crop got 'a'; the number of tokens to take back"),
    Row("crop", -(10**30), "crop got -1000000000000000000000000000000; the number"),
    Row("batch_repeat_interleave", 0, "repeats is 0; a whole number from 1 to"),
    Row("batch_repeat_interleave", 1.5, "repeats is 1.5; a whole number from 1 to"),
    Row("batch_repeat_interleave", True, "repeats is True; a whole number from 1 to"),
    Row("batch_repeat_interleave", "2", "repeats is '2'; a whole number from 1 to"),
    Row("batch_repeat_interleave", 10**30, "repeats is 1000000000000000000000000000000; a whole number"),
    Row("batch_select_indices", torch.tensor([2]), "indices is [2] of shape [1]; the cache has 2 sequences"),
    Row("batch_select_indices", torch.tensor([-3]), "indices is [-3] of shape [1]; the cache has 2 sequences"),
    Row("batch_select_indices", torch.tensor([True]), "indices is [True] of shape [1]; the cache has 2 sequences"),
    Row("batch_select_indices", torch.tensor([0.0]), "indices is torch.float32; a tensor of integers"),
    Row("batch_select_indices", None, "indices is NoneType; a tensor of integers"),
    Row("batch_select_indices", torch.tensor([False, False]), "index has shape [0]; one sequence or more"),
    Row("batch_select_indices", torch.tensor([[0, 1]]), "index has shape [1, 2]; one sequence or more"),
    Row("reorder_cache", torch.tensor([0, 2]), "index reaches from 0 to 2; the cache has 2 sequences"),
    Row("reorder_cache", torch.tensor([0.0]), "index is torch.float32; a tensor of integers"),
    Row("reorder_cache", None, "index is NoneType; a tensor of integers"),
    Row("pad_left", [1, 0], "the cache has 20 positions; padding must be set while it is empty"),
]

UPDATE_LAYER = [
    Row("layer_idx", 2, "layer_idx is 2; the cache has layers 0 … 1"),
    Row("layer_idx", -1, "layer_idx is -1; the cache has layers 0 … 1"),
    Row("layer_idx", 0.0, "layer_idx is 0.0; the cache has layers 0 … 1"),
    Row("layer_idx", None, "layer_idx is None; the cache has layers 0 … 1"),
    Row("key_states", None, "k is a NoneType; it must be a tensor"),
    Row("key_states", with_entry(GOOD["k"], NAN), "k has NaN or infinite entries"),
    Row("value_states", tokens(heads=2, size=5), "they must agree"),
]


def check_unchanged(call: Callable[[], object], says: str, *caches: ba.LayerCache) -> None:
    """The call is refused and the caches hold what they held."""
    before = [contents(cache) for cache in caches]
    check_refused(call, says)
    assert [contents(cache) for cache in caches] == before


@pytest.mark.parametrize("row", SETTINGS, ids=str)
def test_settings_of_a_cache(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    check_refused(lambda: ba.LayerCache(**{"prior": PRIOR, row.name: row.given}), row.says)


@pytest.mark.parametrize("row", LIMITS, ids=str)
def test_limits_of_spans(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    check_refused(lambda: SpanLimits(**{row.name: row.given}), row.says)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ATTEND, ids=str)
def test_arguments_of_attend(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = filled()
    check_unchanged(lambda: cache.attend(**{**GOOD, row.name: row.given}), row.says, cache)  # type: ignore[arg-type]
    assert cache.attend(**GOOD).isfinite().all()


@pytest.mark.parametrize("row", OTHER_LAYERS, ids=str)
def test_tokens_of_another_layer(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = filled()
    check_unchanged(lambda: cache.attend(**{**GOOD, **row.given}), row.says, cache)  # type: ignore[dict-item]


@pytest.mark.parametrize("row", UPDATE, ids=str)
def test_arguments_of_update(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = filled(same_positions=True)
    good: dict[str, Any] = {"k": GOOD["k"], "v": GOOD["v"]}
    check_unchanged(lambda: cache.update(**{**good, row.name: row.given}), row.says, cache)


@pytest.mark.parametrize("row", METHODS, ids=str)
def test_arguments_of_other_methods(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = filled()
    check_unchanged(lambda: getattr(cache, row.name)(row.given), row.says, cache)


@pytest.mark.parametrize("row", PADDING, ids=str)
def test_padding(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = ba.LayerCache(PRIOR)
    check_unchanged(lambda: cache.pad_left(row.given), row.says, cache)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prior", "query_scale", "says"),
    [
        (WrongShape(4), None, "WrongShape returned shape [1, 65536] for 65536 distances; a prior returns [heads, *"),
        (NotANumber(4), None, "NotANumber gives NaN or more than 1e+28 for heads [0, 1, 2, 3]; log-priors are"),
        (PRIOR, lambda n: None, "the query_scale module returned a NoneType; a tensor is needed"),
        (PRIOR, lambda n: torch.ones(4, 7), "query_scale is torch.float32 of shape [4, 7]; floating-point tensors"),
        (PRIOR, lambda n: torch.ones(4, len(n)).long(), "query_scale is torch.int64 of shape [4, 3]"),
        (PRIOR, lambda n: torch.full((4, len(n)), NAN), "query_scale has NaN or infinite entries"),
        (PRIOR, lambda n: torch.full((4, len(n)), 1e38), "logits may reach"),
    ],
    ids=["prior shape", "prior NaN", "no scale", "scale shape", "scale dtype", "scale NaN", "scale too large"],
)
def test_priors_and_query_scales_that_return_nonsense(
    prior: ba.Prior, query_scale: Callable[[Tensor], Tensor], says: str, tried: Tried
) -> None:
    tried("bad inputs", 1)
    cache = ba.LayerCache(prior, query_scale=query_scale)
    check_unchanged(lambda: cache.attend(**GOOD), says, cache)


@pytest.mark.parametrize("row", PREFILL, ids=str)
def test_arguments_of_prefill(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = ba.LayerCache(PRIOR)

    def decoder(part: Tensor, rows: int) -> Tensor:
        x = part[:, None].expand(-1, 4, -1, -1)
        return cache.attend(x, x, x)[:, 0, part.shape[1] - rows :]

    arguments: dict[str, Any] = {"decoder": decoder, "caches": [cache], "prompt": X, row.name: row.given}
    others: Sequence[Any] = arguments["caches"] if isinstance(arguments["caches"], list) else []
    held = [cache, *(other for other in others if isinstance(other, ba.LayerCache))]
    check_unchanged(lambda: ba.prefill(**arguments), row.says, *held)


@pytest.mark.parametrize("row", CACHES, ids=str)
def test_caches_of_the_layers(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    check_refused(lambda: BayesCache(row.given), row.says)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "cache", PRIOR, [ONE]], ids=lambda given: type(given).__name__)
def test_a_layer_of_something_else(given: Any, tried: Tried) -> None:
    tried("bad inputs", 1)
    check_refused(lambda: BayesCacheLayer(given), "; a LayerCache is needed")


@pytest.mark.parametrize("row", HUGGING_FACE, ids=str)
def test_methods_of_transformers(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = BayesCache([filled(same_positions=True) for _ in range(2)])
    check_unchanged(lambda: getattr(cache, row.name)(row.given), row.says, *cache.caches)


@pytest.mark.parametrize("row", UPDATE_LAYER, ids=str)
def test_updates_of_a_layer(row: Row, tried: Tried) -> None:
    tried("bad inputs", 1)
    cache = BayesCache([filled(same_positions=True) for _ in range(2)])
    good: dict[str, Any] = {"key_states": GOOD["k"], "value_states": GOOD["v"], "layer_idx": 1}
    check_unchanged(lambda: cache.update(**{**good, row.name: row.given}), row.says, *cache.caches)


def test_a_cache_with_sinks_is_refused_what_it_cannot_do(tried: Tried) -> None:
    sinks = ba.Sinks(PRIOR)
    check_refused(lambda: ba.LayerCache(sinks, same_positions=True), "which cannot say that keys are sinks; use attend")
    broken = ba.Sinks(PRIOR)
    broken.log_prior.data[1, 1] = NAN
    x = tokens()
    check_refused(lambda: ba.LayerCache(broken).attend(x, x, x), "Sinks gives NaN or more than 1e+28 for heads [1]")
    given = ba.Sinks(ba.ConditionedGaussian(4, 6))
    check_refused(lambda: ba.LayerCache(given).attend(x, x, x), "attend needs parameters=prior(states)")
    check_refused(lambda: ba.LayerCache(sinks).attend(x, x, x, x), "attend takes no parameters with it")
    tried("bad inputs", 4)
