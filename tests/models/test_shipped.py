from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import bayesattn as ba
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.evaluation import passkey
from bayesattn.evaluation.reader import load_reader
from bayesattn.evaluation.trials import measure
from bayesattn.models import shipped
from bayesattn.training.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_shipped_name_is_found_unless_a_folder_of_that_name_stands_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(shipped.resolve("tokenizer")).is_dir()
    (tmp_path / "tokenizer").mkdir()
    assert shipped.resolve("tokenizer") == "tokenizer"
    assert shipped.resolve("owner/model") == "owner/model"


def test_the_shipped_tokenizer_encodes_any_text_and_digits_one_by_one() -> None:
    tokenizer = load_tokenizer("tokenizer")
    for text in ("The pass key is 71432.", " naïve 日本語 \t\n{x}", "", "\x00\x7f", "🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [tokenizer.encode(str(d)) for d in range(10)]
    assert all(len(ids) == 1 for ids in digits)
    assert tokenizer.encode("90210") == [ids[0] for number in "90210" for ids in [digits[int(number)]]]
    assert len(tokenizer) == 1024
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", shipped.shipped_names())
def test_shipped_models_come_with_recipe_log_card_and_tokenizer(name: str) -> None:
    folder = Path(shipped.resolve(name))
    model, tokenizer = ba.load_model(name), ba.load_tokenizer(name)
    code = f"{model.config.model_type}_code.py"
    for file in ("recipe.yaml", "log.jsonl", "README.md", "tokenizer.json", code):
        assert (folder / file).stat().st_size > 100, file
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.to_dict() == load_recipe(RECIPES / f"{name}.yaml").to_dict()
    earlier = {log.stem.partition("-")[2] for log in folder.glob("log-*.jsonl")}
    assert bool(earlier) == bool(recipe.start)
    for part in earlier:
        before = load_recipe(folder / f"recipe-{part}.yaml")
        assert before.to_dict() == load_recipe(RECIPES / f"{before.name}.yaml").to_dict()
    assert model.config.training_length == recipe.data.context == 128
    assert type(model.config).from_pretrained(name).training_length == 128
    assert len(tokenizer) == model.config.vocab_size


def test_together_they_are_small() -> None:
    folder = Path(shipped.resolve("tokenizer")).parent
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 25e6


def test_bam_tiny_finds_the_pass_key_at_64_times_its_training_length() -> None:
    reader = load_reader("bam-tiny")
    for length in (128, 8192):
        cell = measure(reader, passkey.Task(), length, 4, seed=1)
        assert cell.right == 4, cell


def test_a_tokenizer_loads_before_any_model_and_asks_nothing() -> None:
    command = "import bayesattn as ba; print(len(ba.load_tokenizer('bam-tiny')))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "1024"
    assert "custom code" not in done.stderr


@pytest.mark.parametrize("name", shipped.shipped_names())
def test_a_shipped_model_fine_tunes_in_a_plain_trainer(name: str, tmp_path: Path) -> None:
    """A padded batch, no recipe, no code of ours: the loss is the same twice, and it falls."""
    texts = ["The pass key is 71432.", "A much longer text about nothing in particular, with more tokens in it."]
    batch = ba.load_tokenizer(name)(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    items = [{**{key: value[i] for key, value in batch.items()}, "labels": labels[i]} for i in range(2)]
    losses = []
    for run in range(2):
        model = ba.load_model(name).train()
        first = model(**batch, labels=labels).loss.item()
        assert model(**batch, labels=labels).loss.item() == first
        arguments = TrainingArguments(
            str(tmp_path / str(run)), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=items)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@torch.no_grad()
def test_logits_of_shipped_models_are_those_they_were_measured_with() -> None:
    """Refactoring changes no result: tokens 2 … 41, the logits of the last one, as the release that trained it had."""
    expected = load_file(Path(__file__).parent / "shipped_logits.safetensors")
    assert sorted(expected) == shipped.shipped_names()
    ids = torch.arange(2, 42)[None]
    for name, logits in expected.items():
        model = ba.load_model(name)
        for past in (None, model.make_cache()):
            torch.testing.assert_close(model(ids, past_key_values=past).logits[0, -1], logits, atol=2e-5, rtol=1e-5)
