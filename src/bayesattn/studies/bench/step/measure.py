"""One token at a time, of one layer and of whole models: `bayesattn bench step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

import bayesattn as ba
from bayesattn import files
from bayesattn.data.text import bundled
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.models.loading import load_model
from bayesattn.studies.bench.attention.measure import HEADS, SIZE
from bayesattn.studies.bench.decoding import decode
from bayesattn.studies.bench.long.measure import TOLERANCE, mixes
from bayesattn.studies.bench.measure import environment, seconds_in_turn
from bayesattn.studies.bench.peers import llama_like

SMALL, DEEP = "bam-small", "12 layers of 8 × 64"
OURS, DYNAMIC, STATIC = "bayesattn", "DynamicCache", "StaticCache"
# A token is right if without a cache its logit is at most this far below the largest.
LARGEST_GAP = 1e-3


@dataclass(frozen=True)
class Settings:
    """Keys that a query sees, the prompt and the new tokens of `generate`, and the seed."""

    lengths: tuple[int, ...] = (256, 1024, 4096, 65_536)
    prompt: int = 256
    new_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One token through `LayerCache.attend` with Scalable Softmax, and through a full cache with plain SDPA.

    `ratio` is `seconds`, None if they are wrong, over `full_seconds`.
    """

    mix: str
    tokens: int
    seconds: float | None
    full_seconds: float
    ratio: float | None
    bytes: int
    full_bytes: int
    error: float


@dataclass(frozen=True)
class Generation:
    """Tokens a second of greedy `generate`, prompt included; ours are None if a token is wrong.

    `gap` is how far the logit of a token is below the largest, computed without a cache.
    """

    model: str
    prompt: int
    new_tokens: int
    tokens_per_second: float | None
    dynamic_tokens_per_second: float
    static_tokens_per_second: float
    gap: float


def run(settings: Settings) -> Iterator[list[Step] | list[Generation]]:
    """Measure; yields the rows of one length at a time, then those of one model at a time."""
    for tokens in settings.lengths:
        yield [_step(mix, prior, tokens, settings.seed) for mix, prior in mixes().items()]
    for name, make in MODELS.items():
        torch.manual_seed(settings.seed)
        yield [_generation(name, make().eval(), settings)]


def parts(settings: Settings) -> int:
    """How many parts `run` yields."""
    return len(settings.lengths) + len(MODELS)


def to_json(steps: Sequence[Step], generations: Sequence[Generation], settings: Settings) -> str:
    content = {
        "settings": {
            **asdict(settings), "heads": HEADS, "head_size": SIZE, "tolerance": TOLERANCE, **environment()
        },
        "steps": [asdict(row) for row in steps],
        "generate": [asdict(row) for row in generations],
    }  # fmt: skip
    return files.to_json(content, indent=2)


def _step(mix: str, prior: ba.Prior, tokens: int, seed: int) -> Step:
    result = decode(prior, ba.ScalableSoftmax(HEADS, init=0.3), tokens, SIZE, TOLERANCE, seed)
    ratio = None if result.seconds is None else result.seconds / result.full_seconds
    return Step(mix, tokens, result.seconds, result.full_seconds, ratio, result.bytes, result.full_bytes, result.error)


def _deep() -> BamForCausalLM:
    """Random weights; the scales of the priors spread over short and long distances."""
    sizes = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_hidden_layers": 12}
    return BamForCausalLM(BamConfig(**sizes, prior_init="spread"))  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], Any]] = {SMALL: lambda: load_model(SMALL), DEEP: _deep}


def _generation(name: str, model: Any, settings: Settings) -> Generation:
    prompt = _prompt(settings.prompt)
    llama = llama_like(model.config).eval()
    sequences: list[Tensor] = []

    def generate(of: Any, **cache: Any) -> Tensor:
        of.generation_config.eos_token_id = None  # all of the tokens
        mask = torch.ones_like(prompt)
        return of.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=settings.new_tokens, pad_token_id=0, **cache
        )

    def static() -> Tensor:
        cache = StaticCache(llama.config, max_cache_len=settings.prompt + settings.new_tokens)
        return generate(llama, past_key_values=cache)

    work: dict[str, Callable[[], object]] = {
        OURS: lambda: sequences.append(generate(model)),
        DYNAMIC: lambda: generate(llama),
        STATIC: static,
    }
    seconds = seconds_in_turn(work)
    gap = max(_gap(model, sequence, settings.prompt) for sequence in sequences[-1:])
    speed = {key: settings.new_tokens / value for key, value in seconds.items()}
    return Generation(
        name,
        settings.prompt,
        settings.new_tokens,
        speed[OURS] if gap <= LARGEST_GAP else None,
        speed[DYNAMIC],
        speed[STATIC],
        gap,
    )


def _prompt(tokens: int) -> Tensor:
    """Text that no shipped model was trained on, `[1, tokens]`."""
    ids: list[int] = []
    for text in bundled("held-out"):
        ids += load_tokenizer("tokenizer")(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            break
    return torch.tensor([ids[:tokens]])


@torch.no_grad()
def _gap(model: Any, sequence: Tensor, prompt: int) -> float:
    logits = model(sequence, use_cache=False).logits[0, prompt - 1 : -1]
    chosen = logits.gather(1, sequence[0, prompt:, None])[:, 0]
    return float((logits.amax(1) - chosen).max())
