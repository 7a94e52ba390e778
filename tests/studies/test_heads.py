from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.studies.heads import measure as heads
from bayesattn.studies.heads.show import cache_table, posterior_table

STREAM = np.random.default_rng(0).integers(2, 1024, 4000).astype(np.int32)


def small(**changes: Any) -> Reader:
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "prior_init": "spread"} | changes
    return Reader("small", ba.BamForCausalLM(ba.BamConfig(**settings)).eval(), load_tokenizer("tokenizer"), 128)


@pytest.mark.parametrize("changes", [{}, {"scale_prior": False}, {"num_key_value_heads": 2}, {"position": "rope"}])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_recorded_weights_are_what_attention_mixes_values_with(changes: dict[str, Any], qk_norm: bool) -> None:
    reader = small(qk_norm=qk_norm, **changes)
    ids, inputs, outputs = torch.randint(2, 1024, (1, 33)), [], []
    for attention in heads.attentions(reader.model):
        attention.v_proj.register_forward_hook(lambda _, __, output: inputs.append(output))
        attention.o_proj.register_forward_hook(lambda _, args, __: outputs.append(args[0]))
    weights = heads._weights(reader, ids)
    assert [tuple(w.shape) for w in weights] == [(4, 33, 33)] * 2
    for layer, values, mixed in zip(weights, inputs, outputs, strict=True):
        v = values[0].unflatten(-1, (-1, 8)).transpose(0, 1)
        expected = layer @ v.repeat_interleave(4 // len(v), 0)
        torch.testing.assert_close(mixed[0], expected.transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-5)


def test_a_model_that_has_a_cache_by_default_is_measured_too() -> None:
    plain, cached = (heads._weights(small(use_cache=c), torch.arange(2, 40)[None]) for c in (False, True))
    assert len(plain) == 2
    for a, b in zip(plain, cached, strict=True):
        torch.testing.assert_close(a, b)


def test_heads_are_described_with_their_temperature() -> None:
    rows = heads.heads(load_reader("bam-tiny"), [1024, 4096])
    assert [(row.layer, row.head) for row in rows] == [(layer, head) for layer in range(3) for head in range(4)]
    assert {row.kind for row in rows[:8]} == {"local"}
    retrieving = [row for row in rows if "retrieval" in row.kind]
    assert retrieving
    for row in rows:
        assert row.span_3 <= row.span_6 < 4096
        assert row.effective[1] > 3500 if row in retrieving else row.effective[1] < 100
    assert all(row.temperature[1] > row.temperature[0] for row in retrieving)
    assert heads.heads(gpt2()) == []


@pytest.mark.parametrize("scale_prior", [True, False])
def test_priors_are_drawn_as_attention_has_them(scale_prior: bool) -> None:
    reader = small(scale_prior=scale_prior)
    attention = heads.attentions(reader.model)[0]
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        torch.nn.init.zeros_(weight)  # without content the posterior is the prior
    posterior = heads.posteriors(reader, STREAM, 128)[0]
    last = heads._weights(reader, torch.from_numpy(STREAM[None, :128]).long())[0][:, -1].flip(-1).double()
    assert posterior.prior is not None
    torch.testing.assert_close(torch.tensor(posterior.prior).double(), last[:, :64], atol=1e-6, rtol=1e-5)
    assert heads.posteriors(gpt2(), STREAM, 128)[0].prior is None
    scaled = heads.ScaledPrior(attention, 128)
    assert [summary.kind for summary in scaled.describe(128)] == attention.prior.kinds(128)


def test_attention_beyond_what_is_drawn_is_told() -> None:
    profile = torch.zeros(2, 200, dtype=torch.float64)
    profile[:, 0] = torch.tensor([0.5, 1.0])
    profile[0, 150] = 0.1
    row = heads._fit(0, profile)
    assert row.beyond == pytest.approx([0.4, 0.0])
    table = posterior_table([row], "sink")
    told = {str(column.header): list(column.cells) for column in table.columns}
    assert (told["near"], told["far"], told["beyond"]) == (["50%", "100%"], ["10%", "0%"], ["40%", "0%"])
    assert "far" not in [column.header for column in posterior_table([heads._fit(0, profile[:, :100])], "").columns]


def gpt2() -> Reader:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=1024, n_positions=256)
    return Reader("gpt2", GPT2LMHeadModel(config).eval(), load_tokenizer("tokenizer"), 256)


@pytest.mark.parametrize("reader", [small(), gpt2()], ids=["bam", "gpt2"])
def test_profiles_are_means_over_queries_that_see_every_distance(reader: Reader) -> None:
    found = heads.posteriors(reader, STREAM, 128)
    assert len(found) == 2
    for row in found:
        profile = torch.tensor(row.profile)
        assert profile.shape == (4, 64)
        assert (profile >= 0).all()
        assert (profile.sum(-1) <= 1 + 1e-5).all()
        assert torch.tensor(row.beyond) == pytest.approx(1 - profile.sum(-1), abs=1e-6)
        assert len(row.beta) == len(row.scale) == len(row.divergence) == 4
        assert min(row.divergence) > -1e-6


def test_the_nearest_generalized_gaussian_is_found() -> None:
    true = ba.GeneralizedGaussian.from_shape([1.0, 2.0, 0.5], [5.0, 20.0, 3.0], epsilon=1.0)
    found = heads._fit(0, true.log_probability(512).exp())
    assert max(found.divergence) < 2e-3
    assert found.beta == pytest.approx([1.0, 2.0, 0.5], rel=0.1)


def test_bytes_of_the_cache_with_and_without_forgetting() -> None:
    reader = load_reader("bam-tiny")
    rows = heads.cache_sizes(reader, STREAM, [100, 1_000_000], tokens=2048)
    assert rows[1].full == 1_000_000 * 3 * 4 * 32 * 2 * 4
    assert rows[1].kept is not None
    assert rows[1].kept < 0.3 * rows[1].full
    assert [list(column.cells)[1] for column in cache_table(rows, "").columns][2:5:2] == [
        "3,072",
        f"{rows[1].kept / 1e6:,.0f}",
    ]
    assert "kept" not in heads.cache_sizes(gpt2(), STREAM, [100])[0].to_dict()
    with pytest.raises(ValueError, match="the text has 4,000 tokens; posteriors are measured on 5,000"):
        heads.posteriors(reader, STREAM, 5000)
