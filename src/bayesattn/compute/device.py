"""The memory of a device."""

from __future__ import annotations

import os

import torch

CPU = torch.device("cpu")


def device_memory(device: torch.device = CPU) -> int:
    """Bytes of memory of a GPU, or of this machine for any other device, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
