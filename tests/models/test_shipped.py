from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", shipped.shipped())
def test_shipped_models_come_with_recipe_log_card_and_tokenizer(name: str) -> None:
    folder = Path(shipped.resolve(name))
    for file in ("recipe.yaml", "log.jsonl", "README.md", "tokenizer.json", "bam_code.py"):
        assert (folder / file).stat().st_size > 100, file
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.to_dict() == load_recipe(RECIPES / f"{name}.yaml").to_dict()
    earlier = {log.stem.partition("-")[2] for log in folder.glob("log-*.jsonl")}
    assert bool(earlier) == bool(recipe.start)
    for part in earlier:
        before = load_recipe(folder / f"recipe-{part}.yaml")
        assert before.to_dict() == load_recipe(RECIPES / f"{before.name}.yaml").to_dict()
    model, tokenizer = ba.BamForCausalLM.from_pretrained(name), ba.load_tokenizer(name)
    assert model.config.training_length == recipe.data.context == 128
    assert ba.BamConfig.from_pretrained(name).training_length == 128
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
