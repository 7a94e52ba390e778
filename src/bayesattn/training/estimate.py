"""A dry run: build the model of a recipe, check its size, and estimate what training it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from bayesattn.compute.architecture import from_config
from bayesattn.compute.flops import Hardware, find_hardware, matmul_flops, training_flops, training_memory
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.drawing.tables import make_table
from bayesattn.errors import UserError
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.training.optimizers import parameter_groups
from bayesattn.training.recipe import Recipe, RecipeError
from bayesattn.training.run import build_model, configuration, freeze, split_batch

# How far the number of parameters may be from what the recipe expects.
PARAMETER_TOLERANCE = 0.01


@dataclass(frozen=True)
class Estimate:
    """What a run takes; bytes on each device by what they hold."""

    name: str
    parameters: int
    prior_parameters: int
    temperature_parameters: int
    vocabulary: int
    tokens_per_step: int
    tokens: int
    flops: float
    attention_share: float
    device_batch: int
    memory: dict[str, float]
    hardware: Hardware
    devices: int
    mfu: float

    @property
    def hours(self) -> float:
        return self.flops / (self.hardware.flops * self.mfu * self.devices) / 3600

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "parameters": self.parameters,
            "prior_parameters": self.prior_parameters,
            "temperature_parameters": self.temperature_parameters,
            "vocabulary": self.vocabulary,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "flops": self.flops,
            "attention_share": self.attention_share,
            "device_batch": self.device_batch,
            "memory_bytes": self.memory,
            "hardware": self.hardware.name,
            "devices": self.devices,
            "mfu": self.mfu,
            "hours": self.hours,
        }


def negative_keys(config: BamConfig, in_batch_negatives: int) -> tuple[float, float]:
    """Keys that a token sees in the pass with in-batch negatives, its own included, over all heads: mean and largest.

    This pass comes on top of plain attention: it computes the last quarter of each context once more.
    """
    sizes = [2**power for power in range(1, (in_batch_negatives + 1).bit_length())]
    heads = sum(map(sum, config.scalable_heads()))
    keys = heads * ((config.training_length + 3) // 4)
    return keys * sum(sizes) / (len(sizes) + 1), float(keys * max(sizes, default=0))


def estimate(recipe: Recipe, *, hardware: str = "h100", devices: int = 1, mfu: float = 0.4) -> Estimate:
    """Build the model without storage and count.

    Each context counts as one document; masking between documents needs fewer FLOPs.
    """
    if not 0 < mfu <= 1 or devices < 1:
        raise UserError(f"devices is {devices} and mfu {mfu}; at least 1 device and 0 < mfu ≤ 1 are needed")
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    config = configuration(recipe, tokenizer)
    with torch.device("meta"):
        model = build_model(config)
    freeze(model, recipe.training.freeze)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    prior_ids = {id(parameter) for parameter in parameter_groups(model)["prior"]}
    named = [(name, p.numel()) for name, p in model.named_parameters() if id(p) in prior_ids]
    temperatures = sum(number for name, number in named if "temperature" in name)
    counts = {"parameters": parameters, "prior_parameters": sum(number for _, number in named) - temperatures}
    for key, wanted in recipe.expected.items():
        allowed = PARAMETER_TOLERANCE * wanted if key == "parameters" else 0
        if abs(counts[key] - wanted) > allowed:
            raise RecipeError(f"the recipe expects {wanted:,.0f} {key} and its model has {counts[key]:,}")
    architecture = from_config(config, recipe.name)
    settings, context = recipe.training, recipe.data.context
    per_step = settings.batch * context
    tokens = per_step * settings.last_step
    alone, _ = split_batch(recipe, devices)
    average, most = negative_keys(config, recipe.augmentation.in_batch_negatives)
    flops = training_flops(architecture, tokens, context) + 3 * tokens * 4 * architecture.head_size * average
    memory = training_memory(architecture, alone * context, element=2 if settings.precision == "bf16" else 4)
    memory["activations"] += 4.0 * alone * context * most  # weights, in float32 either way
    return Estimate(
        name=recipe.name,
        parameters=parameters,
        prior_parameters=counts["prior_parameters"],
        temperature_parameters=temperatures,
        vocabulary=config.vocab_size,
        tokens_per_step=per_step,
        tokens=tokens,
        flops=flops,
        attention_share=1 - 3 * matmul_flops(architecture) * tokens / flops,
        device_batch=alone,
        memory=memory,
        hardware=find_hardware(hardware),
        devices=devices,
        mfu=mfu,
    )


def estimate_table(estimate: Estimate) -> Table:
    """The cost of training with a recipe."""
    e = estimate
    table = make_table(title=f"{e.name}: what training takes", caption=None)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    table.add_row("parameters", f"{e.parameters / 1e6:,.1f}M", f"vocabulary {e.vocabulary:,}")
    table.add_row("… of priors", f"{e.prior_parameters:,}", f"and {e.temperature_parameters:,} of temperatures")
    table.add_row("tokens", f"{e.tokens / 1e9:,.2f}B", f"{e.tokens_per_step:,} a step")
    table.add_row(
        "FLOPs", f"{e.flops:.2e}", f"{e.attention_share:.0%} of them attention, contexts taken as one document"
    )
    room = "" if sum(e.memory.values()) <= e.hardware.memory else ": more than there is, take fewer contexts at a time"
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in e.memory.items())
    table.add_row(
        "memory", f"{sum(e.memory.values()) / 1e9:,.1f} GB", f"{parts}; {e.device_batch} contexts at a time{room}"
    )
    where = (
        f"{e.devices} × {e.hardware.name} ({e.hardware.flops / 1e12:,.0f} TFLOP/s, {e.hardware.memory / 1e9:,.0f} GB)"
    )
    table.add_row("hours", f"{e.hours:,.1f}", f"on {where} at {e.mfu:.0%} utilisation")
    return table
