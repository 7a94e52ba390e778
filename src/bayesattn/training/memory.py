"""Whether a model and its batch can be trained in the memory of this machine at all."""

from __future__ import annotations

import torch

from bayesattn.compute.device import device_memory
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.training.recipe import RecipeError


def check_memory(parameters: int, config: BamConfig, tokens: int) -> None:
    """Refuse what needs more memory than a device has, at the very least; `estimate` says what training takes.

    The least is weights, gradients and one moment in float32, and for a token one 2-byte hidden state in each
    layer and its logits.
    """
    device, total = "this machine", device_memory()
    if torch.cuda.is_available():
        device, total = "the GPU", device_memory(torch.device("cuda"))
    needed = 12 * parameters + tokens * (2 * config.num_hidden_layers * config.hidden_size + 4 * config.vocab_size)
    if needed > total:
        raise RecipeError(
            f"{parameters:,} parameters and {tokens:,} tokens at a time need more than {needed / 1e9:,.0f} GB and "
            f"{device} has {total / 1e9:,.0f}; a smaller model or training.device_batch is needed"
        )
