"""docs/architectures.md is what the installed transformers gives."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from tools import architectures


def listed() -> dict[str, str]:
    """Results on the page, by architecture."""
    rows = re.findall(r"^\| (\w+) \| ([a-z ]+) \|", architectures.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: result for name, result in rows if name != "architecture"}


def test_no_architecture_on_the_page_fails() -> None:
    assert set(listed().values()) <= {"passes", "refused", "not tried"}
    assert "LlamaForCausalLM" in [name for name, result in listed().items() if result == "passes"]


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ not in architectures.PAGE.read_text(), reason="made with another version")
def test_every_architecture_does_what_the_page_says() -> None:
    torch.use_deterministic_algorithms(False)
    rows = [architectures.examine(*each) for each in architectures.architectures()]
    assert {row.architecture: architectures.RESULTS[row.result] for row in rows} == listed()
