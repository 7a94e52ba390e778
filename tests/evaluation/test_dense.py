from __future__ import annotations

import pytest
import torch

from bayesattn.evaluation import dense
from bayesattn.evaluation.passkey import Task
from bayesattn.evaluation.reader import Reader, load_reader


@pytest.mark.parametrize("elements", [2**26, 5000])
def test_the_dense_way_gives_the_same_logits(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "ELEMENTS", elements)
    found = dense.compare(load_reader("bam-tiny"), Task(), 700)
    assert found.error < 1e-3
    assert found.ratio == found.dense_seconds / found.seconds
    assert found.to_dict()["length"] == 700


def test_other_models_have_one_way_only() -> None:
    reader = load_reader("bam-tiny")
    with pytest.raises(ValueError, match="the comparison is for BAM models"):
        dense.compare(Reader("other", torch.nn.Linear(1, 1), reader.tokenizer, 128), Task(), 200)
