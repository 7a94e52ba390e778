"""Whether a model and its batch can be trained in the memory of this machine at all."""

from __future__ import annotations

import os

import torch

from bayesattn.models.bam.configuration import BamConfig
from bayesattn.training.recipe import RecipeError


def check_memory(parameters: int, config: BamConfig, tokens: int) -> None:
    """Refuse what needs more memory than a device has, at the very least; `estimate` says what training takes.

    The least is weights, gradients and one moment in float32, and for a token one 2-byte hidden state in each
    layer and its logits.
    """
    device = "this machine"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        device, total = "the GPU", torch.cuda.mem_get_info()[1]
    needed = 12 * parameters + tokens * (2 * config.num_hidden_layers * config.hidden_size + 4 * config.vocab_size)
    if needed > total:
        raise RecipeError(
            f"{parameters:,} parameters and {tokens:,} tokens at a time need more than {needed / 1e9:,.0f} GB and "
            f"{device} has {total / 1e9:,.0f}; a smaller model or training.device_batch is needed"
        )
