from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.studies.bench.decoding import DECODED, decode
from bayesattn.studies.bench.long import measure as long
from bayesattn.studies.bench.step import measure as step
from bayesattn.studies.bench.step.fitted import run_models
from bayesattn.studies.bench.step.run import STUDY, Settings, Steps, run
from bayesattn.studies.results import read_results
from bayesattn.studies.runner import Saved
from tests.adapt.cases import make_model
from tests.bad_inputs.rows import check_refused

SETTINGS = Settings(lengths="64,100")


def tiny() -> BamForCausalLM:
    return BamForCausalLM(BamConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(step, "PROMPT", 20)
    monkeypatch.setattr(step, "NEW_TOKENS", 5)


def test_every_length_has_a_row_for_each_mix_and_every_model_one(tmp_path: Path) -> None:
    progress: Saved[Steps] = Saved(STUDY, tmp_path / "step.json")
    result = run(SETTINGS, progress)
    progress.finish(result)
    (generation,) = result.generate
    assert [(row.mix, row.tokens) for row in result.steps] == [(mix, n) for n in (64, 100) for mix in long.mixes()]
    for row in result.steps:
        assert row.seconds is not None
        assert row.ratio == row.seconds / row.full_seconds
    assert generation.tokens_per_second is not None
    assert generation.gap < 1e-5
    saved = read_results(tmp_path / "step.json", "bench-step")
    assert saved["steps"][0]["mix"] == "all local"
    assert saved["generate"][0]["model"] == "tiny"


def test_a_step_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ba.LayerCache.attend
    monkeypatch.setattr(ba.LayerCache, "attend", lambda self, q, k, v: attend(self, q, k, v) * 1.001)
    for row in next(step.run_steps([64])):
        assert row.seconds is row.ratio is None
        assert row.error == pytest.approx(1e-3, rel=0.01)


def test_one_wrong_token_of_a_round_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ba.LayerCache.attend

    def wrong_once(self: ba.LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self, q, k, v) * (1.01 if self.length == 100 else 1)

    monkeypatch.setattr(ba.LayerCache, "attend", wrong_once)
    assert decode(ba.Uniform(2), None, 100, 8, 1e-6, seed=0).seconds is None


def test_every_round_decodes_the_tokens_around_the_length() -> None:
    lengths: list[int] = []

    class Scale(torch.nn.Module):
        def forward(self, counts: Tensor) -> Tensor:
            if len(counts) == 1:
                lengths.append(int(counts))
            return torch.ones(2, len(counts))

    decode(ba.Uniform(2), Scale(), 200, 8, 1e-6, seed=0)
    decoded = list(range(200 - DECODED // 2 + 1, 200 + DECODED // 2 + 1))
    assert set(lengths) == set(decoded)


def test_generation_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = BamForCausalLM.generate

    def wrong(self: Any, *inputs: Any, **settings: Any) -> Any:
        return (generate(self, *inputs, **settings) + 1) % self.config.vocab_size

    monkeypatch.setattr(BamForCausalLM, "generate", wrong)
    ((row,),) = step.run_generate(["tiny"])
    assert row.tokens_per_second is None
    assert row.dynamic_tokens_per_second > 0


def test_the_llama_has_the_sizes_of_the_model_also_where_heads_do_not_divide_the_hidden_size() -> None:
    config = BamConfig(hidden_size=48, num_attention_heads=5, head_dim=8, num_key_value_heads=1)
    ours, llama = BamForCausalLM(config), step.llama_like(config)
    priors = {name for name, _ in ours.named_parameters() if "prior" in name or "temperature" in name}
    sizes = {name: p.shape for name, p in ours.named_parameters() if name not in priors}
    assert {name: p.shape for name, p in llama.named_parameters()} == sizes
    tokens = torch.arange(10)[None]
    assert llama(tokens).logits.shape == ours(tokens).logits.shape


def test_a_fitted_model_decodes_next_to_the_same_model_without_windows(tmp_path: Path) -> None:
    model = ba.add_prior(
        make_model("Llama", vocab_size=1024, max_position_embeddings=4096), ba.Sinks(ba.Window(4, 40), 4)
    )
    model.save_pretrained(tmp_path / "model")
    load_tokenizer("bam-tiny").save_pretrained(tmp_path / "model")
    progress: Saved[Steps] = Saved(STUDY, tmp_path / "step.json")
    result = run(Settings(lengths="300,400", model=str(tmp_path / "model")), progress)
    assert result.decoding is not None
    assert [row.prompt for row in result.decoding] == [300, 400]
    assert not result.steps
    for row in result.decoding:
        assert row.gap < 1e-4
        assert row.full_bytes == 2 * 2 * 2 * 8 * 4 * row.prompt  # keys and values, layers, heads, size, bytes
        assert row.bytes < 0.3 * row.full_bytes
        assert row.tokens_per_second is not None
        fastest = max(row.dynamic_tokens_per_second, row.static_tokens_per_second)
        assert row.ratio == row.tokens_per_second / fastest
    (table,) = STUDY.show.tables(result)
    assert table.row_count == 2
    check_refused(lambda: next(run_models("bam-tiny", [300])), "is a model without windows; the folder of one")
