"""Modules that PEFT has wrapped, as `LoraConfig(modules_to_save=["own_prior"])` does."""

from __future__ import annotations

from typing import Any

from torch import nn


def in_use(module: Any) -> Any:
    """The module itself, or the copy of it that the active adapter of PEFT trains."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    active = module.active_adapters
    return module.original_module if module.disable_adapters or active[0] not in copies else copies[active[0]]
