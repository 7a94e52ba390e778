"""Small models with random weights that the tests of all families share."""

from __future__ import annotations

from typing import Any

import torch

import bayesattn as ba

SETTINGS: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "window": 9, "prior_init": "spread", "prior_epsilon": 1.0, "initializer_range": 0.3,
    "scalable_softmax": [False, [True, False, True, False]], "learned_temperature": True, "eos_token_id": None,
}  # fmt: skip


def make(position: str = "bam", **changes: Any) -> ba.BamForCausalLM:
    torch.manual_seed(0)
    return ba.BamForCausalLM(ba.BamConfig(**{**SETTINGS, "position": position, **changes})).eval()


def make_delayed(position: str = "bam", **changes: Any) -> ba.DelayedKeysForCausalLM:
    torch.manual_seed(0)
    return ba.DelayedKeysForCausalLM(ba.DelayedKeysConfig(**{**SETTINGS, "position": position, **changes})).eval()


def assert_checkpointing_changes_no_gradient(model: ba.BamForCausalLM) -> None:
    """All parameters have the same gradients with gradient checkpointing and without."""
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def tokens(batch: int = 2, length: int = 30, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(seed))
