from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.evaluation.trials import evaluate, measure
from bayesattn.files import short_name
from bayesattn.models.shipped import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("bam-tiny"), tmp_path / "mine"))


def gpt2(folder: Path, vocabulary: int = 1024) -> Path:
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=vocabulary, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_shipped_names_folders_and_other_models_are_read(folder: Path, tmp_path: Path) -> None:
    shipped, own = load_reader("bam-tiny"), load_reader(str(folder))
    assert shipped.train_length == own.train_length == 128
    assert shipped.fingerprint == own.fingerprint
    assert shipped.most_positions is None
    assert shipped.start == [0]
    other = load_reader(str(gpt2(tmp_path / "gpt2")), "tokenizer")
    assert (other.train_length, other.most_positions) == (256, 256)
    assert measure(other, passkey.Task(), 128, 5).right == 0
    (beyond,) = evaluate(other, passkey.Task(), [512], 5)
    assert beyond.note == "not tried: the model has positions for 256 tokens"
    forced = measure(other, passkey.Task(teacher_forced=True), 128, 3)
    assert forced.right == 0


def test_a_model_with_rotary_positions_is_read_beyond_its_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    reader = load_reader(str(tmp_path), "tokenizer")
    assert reader.most_positions is None
    assert measure(reader, passkey.Task(), 300, 2).trials == 2


def test_rotary_positions_are_scaled_by_name(tmp_path: Path) -> None:
    plain, scaled = load_reader("rope-tiny"), load_reader("rope-tiny+yarn:8")
    assert scaled.name == "rope-tiny+yarn:8"
    assert scaled.train_length == 128
    assert scaled.fingerprint != plain.fingerprint
    assert scaled.model.model.rotary_emb.rope_type == "yarn"
    found = [measure(reader, passkey.Task(), 768, 10).right for reader in (plain, scaled)]
    assert found[1] > found[0] + 4
    LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path / "run" / "model")
    other = f"{tmp_path}/run/model+dynamic:4"
    assert load_reader(other, "tokenizer").model.config.rope_parameters["rope_type"] == "dynamic"
    assert short_name(other) == "run+dynamic:4"
    for name, sentence in {
        "bam-tiny+yarn:4": "bam-tiny has no rotary positions that could be scaled",
        "rope-tiny+linear:0.5": "scaled by 0.5; at least 1 and at most 1,000,000 is needed",
        "rope-tiny+yam:4": r"rope-tiny\+yam:4 ends in",
        "rope-tiny+clip": r"rope-tiny\+clip ends in '\+clip'; ",
    }.items():
        with pytest.raises(UserError, match=sentence):
            load_reader(name)


def test_teacher_forced_predicts_the_same_tokens() -> None:
    assert measure(load_reader("bam-tiny"), passkey.Task(teacher_forced=True), 300, 5).right == 5


def test_what_cannot_be_loaded_gets_one_sentence(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"the weights of .* are damaged or cut short"):
        load_reader(str(folder))
    weights.unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded: .*no file named model.safetensors"):
        load_reader(str(folder))
    weights.write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    for change, sentence in (
        ({"hidden_size": 64}, "do not have the shapes of its configuration"),
        (
            {"num_hidden_layers": 4, "prior_init": "zeros", "scalable_softmax": True},
            r"lacks \d+ of the model's weights",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=sentence):
            load_reader(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded; give one with --tokenizer"):
        load_reader(str(folder))
    with pytest.raises(ValueError, match=r"the tokenizer has 1,024 tokens and .* 100; it belongs to another model"):
        load_reader(str(gpt2(tmp_path / "few", 100)), "tokenizer")
    with pytest.raises(ValueError, match=r"is neither a shipped model \(.*bam-tiny.*\) nor a folder, and the hub"):
        load_reader("nobody/nothing")
    with pytest.raises(ValueError, match=r"the tokenizer nobody/nothing cannot be loaded: .* and the hub"):
        load_reader("bam-tiny", "nobody/nothing")
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_reader(str(tmp_path))
    part = gpt2(tmp_path / "part") / "model.safetensors"
    save_file({k: v for k, v in load_file(part).items() if "mlp" not in k}, part, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights, .*mlp.* among them"):
        load_reader(str(tmp_path / "part"), "tokenizer")


def test_learned_positions_end() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 1024}
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=200)).eval()
    reader = Reader("opt", model, load_tokenizer("tokenizer"), 200)
    assert reader.most_positions == 200
    cells = {cell.length: cell for cell in evaluate(reader, passkey.Task(), [200, 300], 1)}
    assert (cells[200].trials, cells[300].trials) == (1, 0)


def test_lengths_beyond_the_memory_are_refused_with_what_would_fit() -> None:
    reader = load_reader("bam-tiny")
    assert reader.bytes_needed(1_048_576) < 2e9
    # Without a bound on the content the last layer keeps what it has until a query tells.
    near = {"prior_init": [[[1.0, 2.0]] * 4] * 3, "scalable_softmax": False}
    bounded, unbounded = (
        Reader("near", ba.BamForCausalLM(ba.BamConfig.preset("tiny", qk_norm=norm, **near)), reader.tokenizer, 128)
        for norm in (True, False)
    )
    assert unbounded.bytes_needed(1_048_576) > 1_048_576 * 4 * 2 * 32 * 4 > 10 * bounded.bytes_needed(1_048_576)
    with pytest.raises(
        ValueError, match=r"tokens need about [\d.]+ GB and [\d.]+ GB may be used; [\d,]+ tokens would fit"
    ):
        next(evaluate(reader, passkey.Task(), [10**10], 1))
