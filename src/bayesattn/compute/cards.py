"""Sizes of public models by name, and of any other model by its configuration."""

from __future__ import annotations

import difflib
from pathlib import Path

from bayesattn.compute.architecture import Architecture, from_config
from bayesattn.errors import UserError, shown
from bayesattn.files import read_json

# Source: the config.json of each published model. The order is: layers, hidden, heads, key/value heads, head size,
# feed-forward, vocabulary.
_GATED = {
    "llama-2-7b": (32, 4096, 32, 32, 128, 11_008, 32_000),
    "llama-2-13b": (40, 5120, 40, 40, 128, 13_824, 32_000),
    "llama-2-70b": (80, 8192, 64, 8, 128, 28_672, 32_000),
    "llama-3-8b": (32, 4096, 32, 8, 128, 14_336, 128_256),
    "llama-3-70b": (80, 8192, 64, 8, 128, 28_672, 128_256),
    "llama-3.1-405b": (126, 16_384, 128, 8, 128, 53_248, 128_256),
    "mistral-7b": (32, 4096, 32, 8, 128, 14_336, 32_000),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12_288, 151_936),
}
CARDS: dict[str, Architecture] = {name: Architecture(name, *sizes) for name, sizes in _GATED.items()} | {
    card.name: card
    for card in (
        Architecture("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, tied=True),
        Architecture("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128_256, tied=True),
        Architecture("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, tied=True),
        Architecture("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151_936, tied=True, qkv_biases=True),
        Architecture("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064, qkv_biases=True),
        Architecture("qwen2.5-72b", 80, 8192, 64, 8, 128, 29_568, 152_064, qkv_biases=True),
        Architecture("gpt2", 12, 768, 12, 12, 64, 3072, 50_257, False, True, True, positions=1024),
        Architecture("gpt2-xl", 48, 1600, 25, 25, 64, 6400, 50_257, False, True, True, positions=1024),
        Architecture("gpt-neox-20b", 44, 6144, 64, 64, 96, 24_576, 50_432, False, False, True),
        Architecture("bloom-176b", 70, 14_336, 112, 112, 128, 57_344, 250_880, False, True, True),
    )
}
OURS = ("tiny", "small", "l6", "l8", "l12", "l15", "l18", "l24")


def find(name: str) -> Architecture:
    """A card, one of our presets (`l12`), a config.json, or a folder that has one."""
    if name in CARDS:
        return CARDS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        content = read_json(path)
        if not isinstance(content, dict):
            raise UserError(f"{path} is not a configuration")
        return from_config(content, name)
    if name in OURS:
        from bayesattn.models.bam.configuration import BamConfig

        return from_config(BamConfig.preset(name), name)
    near = difflib.get_close_matches(name, [*CARDS, *OURS], n=3)
    hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join([*list(CARDS)[:6], '…', *OURS])}"
    raise UserError(f"there is no model {shown(name)}; {hint}, or give a config.json")
