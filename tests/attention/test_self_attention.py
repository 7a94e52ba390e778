"""The module for plain PyTorch is `bayesian_attention` between projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from tests.bad_inputs.rows import check_refused

DIM, HEADS = 24, 6


def make(**settings: Any) -> ba.BayesianSelfAttention:
    settings = {"prior": ba.GeneralizedGaussian(HEADS, "spread", epsilon=1.0), **settings}
    return ba.BayesianSelfAttention(DIM, HEADS, **settings)


def states(length: int = 19, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1))


def by_hand(attention: ba.BayesianSelfAttention, x: Tensor) -> Tensor:
    """One head at a time, dense, in float64."""
    d, groups = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    n = x.shape[1]
    q, k, v = (x.double() @ part.weight.double().T for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    log_prior = attention.prior(distance.double())
    seen = distance >= 0 if attention.causal else torch.ones(n, n, dtype=torch.bool)
    outputs = []
    for head in range(HEADS):
        of_key = slice(head * groups // HEADS * d, (head * groups // HEADS + 1) * d)
        logits = q[:, :, head * d : (head + 1) * d] @ k[:, :, of_key].mT / d**0.5 + log_prior[head]
        if attention.query_scale is not None:
            logits = logits * attention.query_scale(seen.sum(-1).double())[head][:, None]
        outputs.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, of_key])
    return torch.cat(outputs, -1) @ attention.o_proj.weight.double().T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("scaled", [True, False])
def test_it_is_attention_between_projections(causal: bool, kv_heads: int | None, scaled: bool) -> None:
    attention = make(num_kv_heads=kv_heads, causal=causal, query_scale=ba.ScalableSoftmax(HEADS) if scaled else None)
    for length in (19, 1):
        x = states(length)
        torch.testing.assert_close(attention(x).double(), by_hand(attention, x), atol=1e-5, rtol=1e-4)
    x = states().requires_grad_()
    names, weights = zip(*attention.named_parameters(), strict=True)
    ours = torch.autograd.grad(attention(x).square().sum(), [x, *weights])
    theirs = torch.autograd.grad(by_hand(attention, x).square().sum(), [x, *weights])
    for name, *pair in zip(("x", *names), ours, theirs, strict=True):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
def test_a_cache_changes_nothing() -> None:
    attention, x = make(num_kv_heads=2, query_scale=ba.ScalableSoftmax(HEADS)).eval(), states()
    cache = attention.make_cache()
    pieces = [attention(part, cache=cache) for part in x.split([11, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), attention(x), atol=1e-5, rtol=1e-4)
    padded = attention.make_cache()
    padded.pad_left([4, 0])
    torch.testing.assert_close(attention(x, cache=padded)[0, 4:], attention(x[:1, 4:])[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_and_padding_do_not_see_each_other(causal: bool) -> None:
    attention, x = make(causal=causal), states()
    documents = torch.tensor([[7] * 8 + [3] * 6 + [-1] * 5, [-1] * 2 + [0] * 17])
    out = attention(x, document_ids=documents)
    for row, start, end in ((0, 0, 8), (0, 8, 14), (1, 2, 19)):
        alone = attention(x[row : row + 1, start:end])[0]
        torch.testing.assert_close(out[row, start:end], alone, atol=1e-5, rtol=1e-4)
    assert not out[0, 14:].any()


def test_the_default_prior_is_learned_and_flat() -> None:
    attention = ba.BayesianSelfAttention(DIM, HEADS)
    assert isinstance(attention.prior, ba.GeneralizedGaussian)
    assert attention.prior.kinds() == ["flat"] * HEADS
    attention(states()).square().sum().backward()
    assert attention.prior.theta_beta.grad is not None
    assert attention.prior.theta_beta.grad.any()


def test_a_conditioned_prior_gets_the_hidden_states() -> None:
    attention, x = make(prior=ba.ConditionedGaussian(HEADS, DIM)), states()
    split = [part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in
             (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))]  # fmt: skip
    out = ba.bayesian_attention(*split, attention.prior.given(x))
    whole = attention.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), whole)
    cache = attention.eval().make_cache()
    with torch.no_grad():
        pieces = [attention(part, cache=cache) for part in x.split([11, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_prior_may_have_sinks(conditioned: bool) -> None:
    of_others = ba.ConditionedGaussian(HEADS, DIM) if conditioned else ba.Window(HEADS, 2)
    attention, x = make(prior=ba.Sinks(of_others, 3)), states()
    split = [part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in
             (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))]  # fmt: skip
    out = ba.bayesian_attention(*split, attention.prior.given(x) if conditioned else attention.prior)
    torch.testing.assert_close(attention(x), attention.o_proj(out.transpose(1, 2).flatten(2)))
    cache = attention.eval().make_cache()
    with torch.no_grad():
        pieces = [attention(part, cache=cache) for part in x.split(2, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), attention(x), atol=1e-5, rtol=1e-4)


def test_it_compiles_to_one_graph() -> None:
    attention, x = make(query_scale=ba.ScalableSoftmax(HEADS)), states()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attention(x))
    grads = [torch.autograd.grad(each(x).square().sum(), [*attention.parameters()]) for each in (compiled, attention)]
    for pair in zip(*grads, strict=True):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)


def test_half_precision_and_strides_are_allowed() -> None:
    attention, x = make().to(torch.bfloat16), states().to(torch.bfloat16)
    strided = torch.stack([x, x], -1)[..., 0]
    assert attention(x).dtype == torch.bfloat16
    assert torch.equal(attention(strided), attention(x))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dim": 25}, "dim is 25; a multiple of 6 heads up to 1,048,576 is needed"),
        ({"dim": 0}, "dim is 0"),
        ({"num_heads": 0}, "num_heads is 0; a whole number of heads"),
        ({"num_kv_heads": 4}, "num_kv_heads is 4; a number that divides 6 heads is needed"),
        ({"num_kv_heads": 12}, "num_kv_heads is 12"),
        ({"prior": ba.Uniform(4)}, "prior has 4 heads and the attention 6; they must agree"),
        ({"prior": ba.Fire(HEADS, 16)}, "prior is Fire, which depends on positions"),
        ({"prior": torch.zeros(6, 9)}, "prior is a Tensor; a Prior, a ConditionedPrior or Sinks are needed"),
        ({"query_scale": 2.0}, "query_scale is a float; a module, a function or None is allowed"),
        ({"causal": None}, "causal is None; True or False is needed"),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(settings: dict[str, Any], says: str) -> None:
    check_refused(lambda: ba.BayesianSelfAttention(**{"dim": DIM, "num_heads": HEADS, **settings}), says)


def test_calls_that_cannot_be_answered_get_one_sentence() -> None:
    attention, x = make(), states()
    check_refused(lambda: make(causal=False).make_cache(), "only causal attention can continue from a cache")
    check_refused(lambda: attention(x, cache=attention.make_cache()), "a cache carries no gradients")
    documents = torch.zeros(2, 19, dtype=torch.long)
    check_refused(
        lambda: attention.eval()(x, document_ids=documents, cache=attention.make_cache()), "do not go together"
    )
