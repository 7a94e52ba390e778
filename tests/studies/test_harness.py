"""Tasks of lm-eval. Only the slow test starts lm-eval, which takes most of a minute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.studies.harness import run as harness

KNOWN = (*harness.OFFLINE, "hellaswag")


def test_an_unknown_task_is_refused_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub_answers() -> bool:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(harness, "hub_answers", hub_answers)
    with pytest.raises(ValueError, match=r"lm-eval has no task 'helaswag'; `lm_eval ls tasks` lists those it has"):
        harness.check_tasks(["hellaswag", "helaswag"], KNOWN)
    harness.check_tasks(harness.OFFLINE, KNOWN)


def test_a_task_with_data_elsewhere_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "hub_answers", lambda: False)
    sentence = "^hellaswag may need data from the hub, which cannot be reached; these need none: niah_single_1, "
    with pytest.raises(ValueError, match=sentence):
        harness.check_tasks(["ruler_vt", "hellaswag"], KNOWN)
    monkeypatch.setattr(harness, "hub_answers", lambda: True)
    harness.check_tasks(["ruler_vt", "hellaswag"], KNOWN)


class LargeReader(Reader):
    def bytes_needed(self, length: int) -> int:
        return length * 10**9


def test_a_length_that_does_not_fit_is_refused_before_lm_eval_starts() -> None:
    reader = LargeReader("large", SimpleNamespace(device=torch.device("cpu")), None, 128)
    with pytest.raises(ValueError, match="tokens would fit"):
        harness.measure(reader, ["niah_single_1"], length=10**6)


@pytest.mark.slow
def test_lm_eval_asks_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(harness, "hub_answers", lambda: False)
    reader = load_reader("bam-tiny")
    with pytest.raises(ValueError, match="lm-eval has no task 'niah'"):
        harness.measure(reader, ["niah"], length=4096)
    results = harness.measure(reader, ["niah_single_1"], length=4096, limit=2)
    assert 0 <= results["niah_single_1"]["4096,none"] <= 1
