"""Decoding of a model that `bayesattn fit` made, next to the same model without windows in caches of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from bayesattn.adapt.add_prior import remove_prior
from bayesattn.adapt.classes import ModelWithPrior
from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader, load_reader
from bayesattn.studies.bench.measure import seconds_in_turn
from bayesattn.studies.bench.step.measure import DYNAMIC, LARGEST_GAP, OURS, STATIC, gap_of
from bayesattn.studies.bench.step.run import Decoding
from bayesattn.studies.cache_shares.measure import bytes_of

# Tokens of a round, and rounds in turn after one to warm up.
TOKENS, ROUNDS = 8, 12


def run_models(name: str, prompts: Sequence[int]) -> Iterator[list[Decoding]]:
    """Measure decoding of a model after prompts of these lengths; yields the row of one length at a time."""
    reader, original = load_reader(name), load_reader(name).model
    if not isinstance(reader.model, ModelWithPrior):
        raise UserError(f"{name} is a model without windows; the folder of one that `bayesattn fit` made is needed")
    original = remove_prior(original).float()
    original.set_attn_implementation("sdpa")
    reader.model.float()
    for length in prompts:
        reader.check_length(length)
        yield [_decoding(reader, original, length)]


@torch.no_grad()
def _decoding(reader: Reader, original: Any, length: int) -> Decoding:
    prompt = torch.from_numpy(reader.stream(BUNDLED)[:length].astype("int64"))[None]
    if prompt.shape[1] < length:
        raise UserError(f"the bundled text has {prompt.shape[1]:,} tokens of this model; give a smaller --lengths")
    cache, dynamic = reader.model.make_cache(), DynamicCache()
    static = StaticCache(original.config, max_cache_len=length + (ROUNDS + 1) * TOKENS)
    first = _read(reader.model, prompt, cache)
    then = _read(original, prompt, dynamic)
    layers: list[Any] = dynamic.layers
    for number, layer in enumerate(layers):
        static.update(layer.keys, layer.values, number)
    held = bytes_of(cache), bytes_of(dynamic)
    tokens = [first]
    work: dict[str, Callable[[], object]] = {
        OURS: lambda: _decode(reader.model, cache, tokens),
        DYNAMIC: lambda made=[then]: _decode(original, dynamic, made),  # type: ignore[misc]
        STATIC: lambda made=[then]: _decode(original, static, made),  # type: ignore[misc]
    }
    seconds = seconds_in_turn(work, ROUNDS)
    speed = {key: TOKENS / value for key, value in seconds.items()}
    gap = gap_of(reader.model, torch.cat([prompt, *tokens], 1), length)
    is_right = gap <= LARGEST_GAP
    return Decoding(
        model=reader.name,
        prompt=length,
        new_tokens=len(tokens),
        bytes=held[0],
        full_bytes=held[1],
        tokens_per_second=speed[OURS] if is_right else None,
        dynamic_tokens_per_second=speed[DYNAMIC],
        static_tokens_per_second=speed[STATIC],
        ratio=speed[OURS] / max(speed[DYNAMIC], speed[STATIC]) if is_right else None,
        gap=gap,
    )


def _read(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """The likeliest token after these, `[1, 1]`."""
    token: Tensor = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    return token


@torch.no_grad()
def _decode(model: Any, cache: Any, tokens: list[Tensor]) -> None:
    for _ in range(TOKENS):
        tokens.append(_read(model, tokens[-1], cache))
