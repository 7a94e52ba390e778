"""Measurements of our models read converted ones too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesattn.adapt.alibi_models import convert_alibi
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.evaluation.reader import Reader
from bayesattn.studies.convergence.layers import read_layers
from bayesattn.studies.heads import measure
from bayesattn.studies.passkey.dense import dense_logits
from tests.models.alibi.sources import make_source

IDS = np.arange(300, dtype=np.int32) % 997


@pytest.fixture(scope="module", params=["bloom", "mpt, clipped", "falcon, new decoder"])
def reader(request: pytest.FixtureRequest) -> Reader:
    model = convert_alibi(make_source(request.param, vocab_size=1024))
    return Reader("converted", model, load_tokenizer("tokenizer"), 128)


def test_heads_have_the_slopes_and_the_cache_keeps_little(reader: Reader) -> None:
    rows = measure.heads(reader, [64, 256])
    slopes = reader.model.model.layers[0].self_attn.prior.slopes.tolist()
    assert [row.parameters["slope"] for row in rows] == pytest.approx(slopes * 2)
    assert {row.kind for row in rows} <= {"local", "flat"}
    (row,) = measure.cache_sizes(reader, IDS, [100_000], tokens=300)
    assert row.kept is not None
    assert row.kept < 0.8 * row.full


@torch.no_grad()
def test_posteriors_and_logits_are_those_of_dense_attention(reader: Reader) -> None:
    ids = torch.from_numpy(IDS[:64].astype("int64"))[None]
    layers, weights = read_layers(reader.model, ids), measure._weights(reader, ids)
    distance = torch.arange(64)[:, None] - torch.arange(64)
    for layer, given in zip(layers, weights, strict=True):
        log_prior = reader.model.model.layers[layer.number].self_attn.prior(distance)
        logits = (layer.q @ layer.k.mT + log_prior).masked_fill(distance < 0, -torch.inf)
        torch.testing.assert_close(given, logits.softmax(-1), atol=1e-5, rtol=1e-4)
    dense = dense_logits(reader.model, ids, elements=2000)
    torch.testing.assert_close(dense, reader.model(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
