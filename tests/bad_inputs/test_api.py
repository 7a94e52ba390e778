"""Arguments of the public functions and classes that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bayesattn as ba
from tests.adapt.cases import make_model
from tests.bad_inputs.rows import Row, check_refused, rows

Tried = Callable[[str, int], None]
NAN, INF, HUGE = math.nan, math.inf, 10**400
Q = torch.randn(2, 4, 6, 8)
KV = torch.randn(2, 2, 6, 8)
IDS = torch.zeros(2, 6, dtype=torch.long)
PIECES = torch.tensor([[0, 0, 1, 1, 0, 0], [0] * 6])
ROW = torch.zeros(4, 6)
NESTED = torch.nested.nested_tensor([torch.randn(4, 6, 8)] * 2, layout=torch.strided)


class Misshapen(ba.Prior):
    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return distance.float()


def laplace(slope: float) -> ba.Laplace:
    prior = ba.Laplace(4)
    prior.slopes[2] = slope
    return prior


def sinks(log_prior: float) -> ba.Sinks:
    made = ba.Sinks(ba.Laplace(4))
    made.log_prior.data[2, 1] = log_prior
    return made


HEADS = "a whole number of heads from 1 to 65,536 is needed"
FLAG = "True or False is needed"
DENSE = "a dense tensor is needed"
SHARE = "it must be a number in [0, 1)"

# Of bayesian_attention, attention_with_lse, attention_plan and posterior.
ATTENTION = [
    *rows("q k v", ([1.0], "it must be a tensor"), (None, "it must be a tensor"), (1.0, "it must be a tensor")),
    *rows("q k v", (KV[0], "it must be [batch, heads, tokens, head size]"), (KV[:, None], "it must be [batch, heads")),
    *rows("q k v", (KV.long(), "float64, float32, bfloat16 and float16 are allowed"), (KV.cfloat(), "are allowed")),
    *rows("q k v", (KV.to_sparse(), DENSE), (NESTED, DENSE), (KV.double(), "they must agree")),
    *rows("q", (Q[:1], "batch and head size must agree"), (Q[..., :4], "batch and head size must agree")),
    *rows("q", (Q[:, :3], "the heads of k must divide those of q"), (Q[:, :0], "must divide those of q")),
    *rows("k", (KV[..., :0], "must agree"), (KV[:, :, :5], "batch, heads and tokens must agree")),
    *rows("v", (KV[..., :0], "head size and value size must be at least 1"), (KV[:, :1], "must agree")),
    *rows("log_prior", ("alibi", "a Prior, a table [heads, n] or None is allowed"), (1.0, "a Prior, a table")),
    *rows("log_prior", (ba.Uniform(3), "Uniform has 3 heads and q has 4"), (Misshapen(4), "returned shape [6]")),
    *rows(
        "log_prior", (laplace(NAN), "Laplace gives NaN or more than 1e+28 for heads [2]"), (laplace(-INF), "heads [2]")
    ),
    *rows("log_prior", (torch.full((4, 6), NAN), "log-priors are numbers up to that, or -inf")),
    *rows("log_prior", (torch.full((4, 6), INF), "log-priors are numbers up to that, or -inf")),
    *rows("log_prior", (torch.full((4, 6), 1e300, dtype=torch.float64), "the table gives NaN or more than 1e+28")),
    *rows("log_prior", (ROW[:2], "a floating-point tensor [4, n], one row per head"), (ROW[0], "one row per head")),
    *rows("log_prior", (ROW.long(), "the log_prior table is torch.int64"), (ROW.cfloat(), "a floating-point tensor")),
    *rows("log_prior", (ROW[:, :5], "causal distances 0 … 5 need 6"), (ROW.to_sparse(), DENSE)),
    *rows("log_prior", (ba.Sinks(ba.Uniform(3)), "Uniform has 3 heads and q has 4")),
    *rows("log_prior", (ba.Sinks(laplace(NAN)), "Laplace gives NaN or more than 1e+28 for heads [2]")),
    *rows("log_prior", (sinks(NAN), "Sinks gives NaN or more than 1e+28 for heads [2]"), (sinks(INF), "heads [2]")),
    *rows("log_prior", (ba.Sinks(ba.Fire(4, 8)), "give prior.given(states) to attention")),
    *rows("log_prior", (ba.Sinks(ba.Fire(4, 8)).given(torch.arange(5)), "the states of 5 queries and q has 6")),
    *rows("query_scale", (2.0, "a tensor, a module or None is allowed"), ("log", "a tensor, a module or None")),
    *rows("query_scale", (lambda counts: None, "the query_scale module returned a NoneType")),
    *rows("query_scale", (torch.ones(6), "of shape [4, 6] or [2, 4, 6] are allowed"), (ROW.long(), "floating-point")),
    *rows("query_scale", (torch.full((4, 6), NAN), "NaN or infinite"), (torch.full((4, 6), INF), "NaN or infinite")),
    *rows("query_scale", (torch.full((4, 6), 1e38), "at most 1e+29 is allowed"), (ROW.to_sparse(), DENSE)),
    *rows("scale_prior causal", (None, FLAG), ("false", FLAG), (1, FLAG), (0.0, FLAG), (torch.tensor(True), FLAG)),
    *rows("softmax_scale", (torch.ones(()), "a number is needed"), ("a", "it must be a finite number")),
    *rows("softmax_scale", (NAN, "finite number"), (INF, "finite number"), (HUGE, "finite number"), (True, "finite")),
    *rows("softmax_scale", (1e38, "at most 1e+29 is allowed"), ([1.0], "it must be a finite number")),
    *rows("query_offset", (1.5, "a whole number"), ("0", "a whole number"), (True, "a whole number")),
    *rows("query_offset", (NAN, "a whole number"), (2**63, "from -2**53 to 2**53"), (-HUGE, "from -2**53 to 2**53")),
    *rows("document_ids", (IDS.float(), "a tensor of integers"), (IDS.cfloat(), "a tensor of integers")),
    *rows("document_ids", (IDS.bool(), "a tensor of integers"), (IDS.to(torch.uint32), "a tensor of integers")),
    *rows("document_ids", ([0], "a tensor of integers"), (0, "a tensor of integers"), (IDS.to_sparse(), DENSE)),
    *rows("document_ids", (IDS[:1], "one id per key, [2, 6]"), (IDS[0], "one id per key"), (PIECES, "one unbroken")),
    *rows("tolerance", (-0.1, SHARE), (1.0, SHARE), (NAN, SHARE), (INF, SHARE), ("a", SHARE), (None, SHARE)),
    *rows("tolerance", (HUGE, SHARE), (True, SHARE), ([0.1], SHARE)),
    *rows("implementation", ("flash", "allowed are auto, reference, "), ([], "allowed are"), (None, "allowed are")),
    *rows("implementation", ("x" * 10_000, "allowed are auto"), (3, "allowed are auto")),
    *rows("tolerence", (0.1, "tolerence")),
]

GOOD: dict[str, Any] = {"q": Q, "k": KV, "v": KV}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "bayesian_attention": ba.bayesian_attention,
    "attention_with_lse": ba.attention_with_lse,
    "attention_plan": ba.attention_plan,
    "posterior": ba.posterior,
}
# What a function does not have, or does not look at.
OTHERS = {
    "bayesian_attention": ("tolerence",),
    "attention_plan": ("implementation",),
    "posterior": ("v", "tolerance", "implementation", "tolerence"),
}
NOT_CHECKED = {
    "attention_plan": ("at most 1e+29 is allowed",),
    "posterior": ("batch, heads and tokens must agree",),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_of_attention_is_refused_in_one_sentence(function: str, tried: Tried) -> None:
    count = 0
    for row in ATTENTION:
        if row.name in OTHERS.get(function, ()) or row.says in NOT_CHECKED.get(function, ()):
            continue
        given = {**GOOD, row.name: row.given}
        if function == "posterior":
            del given["v"]
        check_refused(lambda given=given: FUNCTIONS[function](**given), row.says)
        count += 1
    tried("bad inputs", count)


@pytest.mark.parametrize("offset", [-1, 1])
def test_documents_need_queries_at_keys(offset: int) -> None:
    settings = {**GOOD, "document_ids": IDS, "query_offset": offset}
    check_refused(lambda: ba.bayesian_attention(**settings), "every query must stand at the position of a key")


def test_a_table_for_both_sides_has_an_odd_number_of_entries() -> None:
    for entries in (6, 12):
        table = torch.zeros(4, entries)
        check_refused(
            lambda table=table: ba.bayesian_attention(Q, KV, KV, table, causal=False), "need 11 or a larger odd number"
        )


def test_far_positions_need_float64() -> None:
    check_refused(lambda: ba.bayesian_attention(Q, KV, KV, ba.Laplace(4), query_offset=2**25), "use float64")
    doubles = (Q.double(), KV.double(), KV.double())
    assert ba.bayesian_attention(*doubles, ba.Laplace(4), query_offset=2**25).isfinite().all()


MAKE: dict[str, Callable[..., object]] = {
    "Uniform": lambda **given: ba.Uniform(**{"num_heads": 2, **given}),
    "Laplace": lambda **given: ba.Laplace(**{"num_heads": 2, **given}),
    "GeneralizedGaussian": lambda **given: ba.GeneralizedGaussian(**{"num_heads": 2, **given}),
    "from_shape": lambda **given: ba.GeneralizedGaussian.from_shape(**{"beta": [1, 2], "scale": [1, 2], **given}),
    "Window": lambda **given: ba.Window(**{"num_heads": 2, "width": 4, **given}),
    "KerpleLog": lambda **given: ba.KerpleLog(**{"num_heads": 2, **given}),
    "KerplePower": lambda **given: ba.KerplePower(**{"num_heads": 2, **given}),
    "T5Buckets": lambda **given: ba.T5Buckets(**{"num_heads": 2, **given}),
    "Product": lambda **given: ba.Product(**{"first": ba.Laplace(2), "second": ba.Uniform(2), **given}),
    "Sinks": lambda **given: ba.Sinks(**{"prior": ba.Laplace(2), **given}),
    "sinks_given": lambda states: ba.Sinks(ba.Laplace(2)).given(states),
    "call_sinks": lambda distance: ba.Sinks(ba.Laplace(2))(distance),
    "summarise_sinks": lambda function: getattr(ba.Sinks(ba.Laplace(2)), function)(8),
    "sinks_times": lambda factor: [ba.Sinks(ba.Laplace(2)) * factor],
    "times_sinks": lambda factor: [factor * ba.Sinks(ba.Laplace(2))],
    "SinkLogit": lambda **given: ba.SinkLogit(**{"num_heads": 2, **given}),
    "apply_sink_logit": lambda **given: ba.SinkLogit(4)(**{"out": Q, "lse": Q[..., 0], **given}),
    "Llama4Scaling": lambda **given: ba.Llama4Scaling(**{"num_heads": 2, **given}),
    "MistralScaling": lambda **given: ba.MistralScaling(**{"num_heads": 2, **given}),
    "InklingScaling": lambda **given: ba.InklingScaling(**{"num_heads": 2, "length": 8, **given}),
    "ScalableSoftmax": lambda **given: ba.ScalableSoftmax(**{"num_heads": 2, **given}),
    "alibi_slopes": lambda **given: ba.alibi_slopes(**{"num_heads": 2, **given}),
    "span": lambda **given: ba.Laplace(2).span(**{"mass": 0.1, "n": 8, **given}),
    "effective_tokens": lambda **given: ba.Laplace(2).effective_tokens(**{"n": 8, **given}),
    "log_probability": lambda **given: ba.Laplace(2).log_probability(**{"n": 8, **given}),
    "kinds": lambda **given: ba.Laplace(2).kinds(**{"n": 8, **given}),
    "describe": lambda **given: ba.Laplace(2).describe(**{"n": 8, **given}),
    "visible_counts": lambda **given: ba.visible_counts(**{"num_queries": 2, "num_keys": 2, **given}),
    "register_kernel": lambda **given: ba.register_kernel(**{"name": "new", "kernel": None, **given}),
    "shipped": lambda **given: ba.shipped(**given),
    "remove_prior": lambda **given: ba.remove_prior(**given),
    "add_prior": lambda **given: ba.add_prior(**{"model": make_model("Llama"), "prior": ba.Uniform(4), **given}),
    "load_model": lambda **given: ba.load_model(**given),
    "load_tokenizer": lambda **given: ba.load_tokenizer(**given),
}
TWO_NUMBERS = "2 heads need 2 numbers"
TOKENS = "a whole number of tokens from 1 to"
WIDTH = "a whole number of keys from 1 to 16,777,216, or one for each of 2 heads, is needed"
EACH = "a sequence of 2, True or False for each head, is needed"
THERE = "is neither a shipped model"

OTHER = [
    *rows(
        "Uniform.num_heads Laplace.num_heads GeneralizedGaussian.num_heads Window.num_heads KerpleLog.num_heads "
        "KerplePower.num_heads T5Buckets.num_heads ScalableSoftmax.num_heads alibi_slopes.num_heads "
        "SinkLogit.num_heads Llama4Scaling.num_heads MistralScaling.num_heads InklingScaling.num_heads",
        *((value, HEADS) for value in (0, -1, 1.5, "2", None, True, NAN, HUGE, [2])),
    ),
    *rows("Laplace.slopes", ([1.0], TWO_NUMBERS), ([[1.0, 2.0]], TWO_NUMBERS), ([1.0, NAN], "finite numbers")),
    *rows("Laplace.slopes", ([1.0, INF], "finite"), (["a", "b"], "one number per head"), (1.0, TWO_NUMBERS)),
    *rows("Laplace.slopes Window.width", ([["a" * 100] * 100] * 100, "needed")),
    *rows("Laplace.slopes", ([1.0, HUGE], "one number per head is needed"), ("ab", "one number per head is needed")),
    *rows("Laplace.learned KerpleLog.learned KerplePower.learned", (None, FLAG), ("yes", FLAG), (1, FLAG)),
    *rows(
        "GeneralizedGaussian.init", ("gauss", "'linear' and 'sampled' are allowed"), (None, "'zeros'"), (0, "'zeros'")
    ),
    *rows("GeneralizedGaussian.learn from_shape.learn", (("sigma",), "a collection of"), ("beta", "a collection of")),
    *rows("GeneralizedGaussian.learn from_shape.learn", (None, "a collection of"), ([1], "a collection of")),
    *rows(
        "GeneralizedGaussian.epsilon from_shape.epsilon",
        *((value, "a number from 1e-30 to 1e30") for value in (0.0, -1.0, NAN, INF, "a", None, True, 1e-300, HUGE)),
    ),
    *rows("from_shape.beta", ([1.0], TWO_NUMBERS.replace("2", "1")), ([NAN, 1.0], "finite"), ([INF, 1.0], "finite")),
    *rows("from_shape.scale", ([1.0], TWO_NUMBERS), ([1.0, NAN], "finite"), ([1.0, INF], "finite")),
    *rows("from_shape.scale", ([1.0, 0.0], "positive numbers of tokens"), ([1.0, -1.0], "positive numbers of tokens")),
    *rows("from_shape.beta from_shape.scale from_shape.centre", ("ab", "one number per head"), ({}, "one number per")),
    *rows("from_shape.centre", ([1.0], TWO_NUMBERS), ([1.0, NAN], "finite"), ([1.0, -INF], "finite")),
    *rows("Window.width", *((value, WIDTH) for value in (0, -1, 1.5, "4", None, True, NAN, HUGE))),
    *rows("Window.width", *((value, WIDTH) for value in ([1, 2, 3], [4], [], [4, 0], [4, 1.5], [4, "a"]))),
    *rows("T5Buckets.num_buckets", *((value, "a number from 2 to") for value in (1, -2, 2.5, "8", None, True, HUGE))),
    *rows("T5Buckets.max_distance", *((value, "a whole number above 16") for value in (8, -2, 99.5, "99", None, HUGE))),
    *rows("T5Buckets.bidirectional", (None, FLAG), ("yes", FLAG), (1, FLAG)),
    *rows("Product.first Product.second", (3, "two priors are needed"), (None, "two priors"), ("alibi", "two priors")),
    *rows("Product.second", (ba.Uniform(3), "the same number of heads in both")),
    *rows(
        "ScalableSoftmax.init", *((value, "a number up to 1e+20") for value in (NAN, INF, "a", None, True, 1e30, HUGE))
    ),
    *rows(
        "Sinks.prior", (None, "sinks need the prior of the other keys"), (ba.Sinks(ba.Uniform(2)), "of the other keys")
    ),
    *rows(
        "Sinks.count", *((value, "a whole number of sinks from 1 to") for value in (0, -1, 1.5, "4", None, True, HUGE))
    ),
    *rows(
        "Sinks.init SinkLogit.init", *((value, "a number up to 1e+20") for value in (NAN, INF, "a", None, True, HUGE))
    ),
    *rows("sinks_given.states", (Q, "Laplace does not depend on states")),
    *rows("call_sinks.distance", (Q, "Sinks is no function of distance")),
    *rows("summarise_sinks.function", *((name, "use its .prior") for name in ("kinds", "describe", "log_probability"))),
    *rows("sinks_times.factor times_sinks.factor", (ba.Laplace(2), "write Sinks(a * b)"), (2, "a * b")),
    *rows("apply_sink_logit.out", (Q[0], "[batch, heads, queries, size]"), (Q[:, :3], "SinkLogit of 4 heads")),
    *rows("apply_sink_logit.lse", (None, "the two tensors of attention_with_lse"), (Q, "[batch, heads, queries]")),
    *rows(
        "Llama4Scaling.strength MistralScaling.strength InklingScaling.strength",
        *((value, "a number up to 1e+20") for value in (NAN, INF, "a", None, True, HUGE)),
    ),
    *rows(
        "Llama4Scaling.length MistralScaling.length InklingScaling.length",
        *((value, "a whole number of tokens from 1 to") for value in (0, -1, 1.5, "8", None, True, HUGE)),
    ),
    *rows("ScalableSoftmax.grows_with_length", ([True], EACH), (True, EACH), ([1, 0], EACH), ("ab", EACH), ([], EACH)),
    *rows("span.mass", *((value, "must be in [0, 1)") for value in (1.0, -0.1, NAN, INF, "a", None, True, HUGE))),
    *rows(
        "span.n effective_tokens.n log_probability.n kinds.n describe.n",
        *((value, TOKENS) for value in (0, -1, 1.5, "8", None, True, NAN, HUGE)),
    ),
    *rows(
        "visible_counts.num_queries visible_counts.num_keys",
        *((value, "a whole number from 0 to") for value in (-1, 1.5, "2", None, True, NAN, HUGE)),
    ),
    *rows("visible_counts.query_offset", *((value, "from -2**53 to 2**53") for value in (1.5, "0", True, NAN, HUGE))),
    *rows("visible_counts.causal", (None, FLAG), ("no", FLAG), (1, FLAG)),
    *rows("visible_counts.document_ids", ([0, 0], "a tensor of integers"), (torch.zeros(1, 2), "a tensor of integers")),
    *rows("visible_counts.document_ids", (IDS, "one id per key, [batch, 2]"), (IDS[0, :2], "one id per key")),
    *rows("register_kernel.name", ("auto", "a Kernel"), (3, "a name and a Kernel are needed"), (None, "a name")),
    *rows("register_kernel.kernel", (print, "a name and a Kernel are needed"), (None, "a Kernel"), (3, "a Kernel")),
    *rows(
        "shipped.name", *((value, "comes with bayesattn") for value in ("no-such", "", None, 3, "a\0b", "x" * 10_000))
    ),
    *rows(
        "add_prior.model remove_prior.model",
        *((value, "the model is a") for value in (None, "bam-tiny", ba.Uniform(4))),
    ),
    *rows(
        "add_prior.prior", *((value, "a Prior, or a sequence of 2") for value in (None, "alibi", 3, [ba.Uniform(4), 3]))
    ),
    *rows(
        "add_prior.prior", (ba.Uniform(3), "has 3 heads"), ([ba.Uniform(4), ba.Uniform(3)], "has 3 heads and layer 1")
    ),
    *rows(
        "add_prior.query_scale", *((value, "a ScalableSoftmax, or a sequence") for value in (2.0, "log", torch.ones(4)))
    ),
    *rows("add_prior.layers", *((value, "are needed") for value in (0, "01", [], [2], [-1], [0.5], [True], [HUGE]))),
    *rows("add_prior.position", *((value, "'keep' and 'drop' are allowed") for value in (None, "rope", 0, True))),
    *rows("add_prior.scale_prior add_prior.shared", (None, FLAG), ("yes", FLAG), (1, FLAG)),
    *rows("load_model.name load_tokenizer.name", ("no-such-model", "nor a folder"), ("x" * 10_000, ""), ("", "")),
    *rows("load_model.name load_tokenizer.name", (None, ""), (3, ""), ("a\0b", ""), ("../" * 20, ""), ("a b/c:d", "")),
    *rows("load_model.name", ("rope-tiny+yarn:0.5", "at least 1"), ("bam-tiny+yarn:16", "no rotary positions")),
    *rows(
        "load_model.name", ("rope-tiny+bogus:3", "+yarn:FACTOR are allowed"), ("rope-tiny+yarn:1e400", "'+yarn:1e400'")
    ),
    *rows("load_model.name", ("rope-tiny+yarn:" + "9" * 400, "are to be scaled by inf")),
]


@pytest.mark.parametrize("row", OTHER, ids=str)
def test_an_argument_is_refused_in_one_sentence(row: Row, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    function, _, parameter = row.name.partition(".")
    check_refused(lambda: MAKE[function](**{parameter: row.given}), row.says)
    tried("bad inputs", 1)
