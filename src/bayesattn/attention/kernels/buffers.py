"""Memory that tiles and calls use again: new memory costs more in page faults than the arithmetic of a tile."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Elements of the largest buffer that is kept for later calls.
MOST_KEPT = 2**20


class _Kept(threading.local):
    """What later calls of the same thread use again."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}


_kept = _Kept()


class _Of(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}


class Buffers:
    """Buffers by name for one call. Each thread has its own."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.of_call = _Of()

    def get(self, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Memory of this shape with anything in it. The next call with this name gives the same memory."""
        size = torch.Size(shape).numel()
        kept = _kept.buffers.setdefault((self.dtype, self.device), {})
        buffers = kept if size <= MOST_KEPT else self.of_call.buffers
        if name not in buffers or buffers[name].numel() < size:
            with torch.inference_mode(False):  # a kept one is written to in other modes too
                buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return buffers[name][:size].view(shape)


def clear() -> None:
    """Forget what this thread has kept."""
    _kept.buffers.clear()
