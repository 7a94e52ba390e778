"""One token at a time, of one layer and of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

import bayesattn as ba
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
from bayesattn.studies.bench.step.run import Generation, Step

SMALL, DEEP = "bam-small", "12 layers of 8 × 64"
OURS, DYNAMIC, STATIC = "bayesattn", "DynamicCache", "StaticCache"
# A token is right if without a cache its logit is at most this far below the largest.
LARGEST_GAP = 1e-3


# Tokens of `generate`.
PROMPT, NEW_TOKENS = 256, 128


def sizes(lengths: Sequence[int], seed: int) -> dict[str, object]:
    """Sizes, seed, software and hardware of the measurement."""
    return {
        "lengths": list(lengths),
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
        "seed": seed,
        "heads": HEADS,
        "head_size": SIZE,
        "tolerance": TOLERANCE,
        **environment(),
    }


def run_steps(lengths: Sequence[int], seed: int = 0) -> Iterator[list[Step]]:
    """Measure one token of one layer; yields the rows of one length at a time."""
    for tokens in lengths:
        yield [_step(mix, prior, tokens, seed) for mix, prior in mixes().items()]


def run_generate(models: Sequence[str], seed: int = 0) -> Iterator[list[Generation]]:
    """Measure `generate` of some of `MODELS`; yields the row of one model at a time."""
    for name in models:
        torch.manual_seed(seed)
        yield [_generation(name, MODELS[name]().eval())]


def _step(mix: str, prior: ba.Prior, tokens: int, seed: int) -> Step:
    result = decode(prior, ba.ScalableSoftmax(HEADS, init=0.3), tokens, SIZE, TOLERANCE, seed)
    ratio = None if result.seconds is None else result.seconds / result.full_seconds
    return Step(mix, tokens, result.seconds, result.full_seconds, ratio, result.bytes, result.full_bytes, result.error)


def _deep() -> BamForCausalLM:
    """Random weights; the scales of the priors spread over short and long distances."""
    sizes = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_hidden_layers": 12}
    return BamForCausalLM(BamConfig(**sizes, prior_init="spread"))  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], Any]] = {SMALL: lambda: load_model(SMALL), DEEP: _deep}


def _generation(name: str, model: Any) -> Generation:
    prompt = _prompt(PROMPT)
    llama = llama_like(model.config).eval()
    sequences: list[Tensor] = []

    def generate(of: Any, **cache: Any) -> Tensor:
        of.generation_config.eos_token_id = None  # all of the tokens
        mask = torch.ones_like(prompt)
        return of.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, **cache
        )

    def static() -> Tensor:
        cache = StaticCache(llama.config, max_cache_len=PROMPT + NEW_TOKENS)
        return generate(llama, past_key_values=cache)

    work: dict[str, Callable[[], object]] = {
        OURS: lambda: sequences.append(generate(model)),
        DYNAMIC: lambda: generate(llama),
        STATIC: static,
    }
    seconds = seconds_in_turn(work)
    gap = max(gap_of(model, sequence, PROMPT) for sequence in sequences[-1:])
    speed = {key: NEW_TOKENS / value for key, value in seconds.items()}
    return Generation(
        name,
        PROMPT,
        NEW_TOKENS,
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
def gap_of(model: Any, sequence: Tensor, prompt: int) -> float:
    """How far the logit of any token after the prompt is below the largest, computed without a cache."""
    new = sequence.shape[1] - prompt
    logits = model(sequence, use_cache=False, logits_to_keep=new + 1).logits[0, :-1]
    chosen = logits.gather(1, sequence[0, prompt:, None])[:, 0]
    return float((logits.amax(1) - chosen).max())
