"""The examples run, learn, and read longer than they were trained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_text_model_learns_and_reads_longer(capsys: pytest.CaptureFixture[str]) -> None:
    bits = load("train_text").main(steps=30, lengths=(64, 256))
    assert bits[64] < 5  # 8 before training
    assert bits[256] < bits[64] + 0.3
    assert "The " in capsys.readouterr().out


def test_an_encoder_learns_how_far_to_look_and_reads_longer(capsys: pytest.CaptureFixture[str]) -> None:
    right = load("encoder").main(steps=100, lengths=(32, 256))
    assert min(right.values()) > 0.85
    assert "head 3: local" in capsys.readouterr().out


def test_lora_trains_saves_and_loads_the_prior_of_a_llama() -> None:
    pytest.importorskip("peft")
    before, after = load("lora_llama").main(steps=25)
    assert after < before - 0.5


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text()
    assert all(f'load("{file.stem}")' in here for file in FOLDER.glob("*.py"))
