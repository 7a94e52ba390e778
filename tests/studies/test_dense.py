from __future__ import annotations

import pytest
import torch

from bayesattn.evaluation.passkey import Task
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.studies.passkey import dense


@pytest.mark.parametrize("elements", [2**26, 100_000])
def test_dense_attention_gives_the_same_logits(elements: int) -> None:
    comparison = dense.compare(load_reader("bam-tiny"), Task(), 700, elements=elements)
    assert comparison.error < 1e-3
    assert comparison.ratio == comparison.dense_seconds / comparison.seconds
    assert comparison.to_dict()["length"] == 700


def test_other_models_have_one_way_only() -> None:
    reader = load_reader("bam-tiny")
    with pytest.raises(ValueError, match="other is a Linear; the dense comparison needs a model of ours"):
        dense.compare(Reader("other", torch.nn.Linear(1, 1), reader.tokenizer, 128), Task(), 200)
