"""Memory of devices, against what the system and torch say themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bayesattn.compute.device import device_memory


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says it in a file")
def test_the_memory_of_the_processor_is_that_of_the_machine() -> None:
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert total is not None
    assert device_memory() == device_memory(torch.device("cpu")) == 1024 * int(total[1])


def test_the_memory_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10 + device.index))
    assert device_memory(torch.device("cuda", 1)) == 11
