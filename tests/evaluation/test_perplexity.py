from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import bayesattn as ba
from bayesattn.evaluation.perplexity import perplexity


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    model = ba.BamForCausalLM(ba.BamConfig(vocab_size=50, hidden_size=16, num_attention_heads=2)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    stream = np.arange(3000, dtype=np.int32) % 50
    assert perplexity(model, stream, 64, 5) == pytest.approx(50)
    assert perplexity(model, stream, 64, 5, before=500, first=600) == pytest.approx(50)


def test_it_is_the_loss_of_the_window_alone() -> None:
    torch.manual_seed(0)
    model = ba.BamForCausalLM(ba.BamConfig(vocab_size=50, hidden_size=16, num_attention_heads=2)).eval()
    stream = np.random.default_rng(0).integers(0, 50, 41).astype(np.int32)
    ids = torch.from_numpy(stream[:40].astype("int64"))[None]
    labels = ids.clone()
    labels[:, :21] = -100  # the first token of the window has nobody to predict it
    assert perplexity(model, stream, 20, 1, before=20) == pytest.approx(math.exp(model(ids, labels=labels).loss.item()))


def test_a_short_text_gets_one_sentence() -> None:
    with pytest.raises(
        ValueError, match="the text has 10 tokens; 64 windows of 8 from token 4 on, with 4 before each, do not fit"
    ):
        perplexity(None, np.zeros(10, dtype=np.int32), 8, before=4)
