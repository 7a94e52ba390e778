"""A Llama gets a prior and Scalable Softmax, and LoRA trains them with its matrices. A few seconds on a CPU.

The Llama here is small and random, so that the example runs without a download; give the folder or the Hugging Face id
of another one for yours. The adapter that is saved has the matrices of LoRA, the priors and the temperatures.

    python examples/lora_llama.py [MODEL]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import bayesattn as ba

SYMBOLS, LENGTH, BATCH = 16, 32, 16


def small_llama() -> LlamaForCausalLM:
    """Random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def periodic(number: int, length: int) -> torch.Tensor:
    """Sequences of two tokens in turn."""
    return torch.randint(SYMBOLS, (number, 2)).repeat(1, length // 2)


def main(model: Any = None, steps: int = 50) -> tuple[float, float]:
    """Train, save and load the adapter; return the loss before and after."""
    model = small_llama() if model is None else model
    heads = model.config.num_attention_heads
    ba.add_prior(model, ba.GeneralizedGaussian(heads), ba.ScalableSoftmax(heads))
    base = tempfile.mkdtemp()
    model.save_pretrained(base)
    adapted = get_peft_model(
        model,
        LoraConfig(r=16, target_modules="all-linear", modules_to_save=["prior", "temperature"], task_type="CAUSAL_LM"),
    )
    adapted.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        tokens = periodic(BATCH, LENGTH)
        loss = adapted(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    adapter = tempfile.mkdtemp()
    adapted.save_pretrained(adapter)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, adapted.eval()(input_ids=tokens).logits)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main(AutoModelForCausalLM.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else None)
