"""Read a prompt of any length in chunks, through a stack of layers with their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesattn.attention.cache import LayerCache

# A layer takes hidden states [B, M, C], its cache, and how many of the last rows to answer for; it returns those rows.
# One that reads what an earlier one does is given that too.
Layer = Callable[..., Tensor]


def prefill(
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    prompt: Tensor | Sequence[Tensor],
    *,
    embed: Callable[[Tensor], Tensor] | None = None,
    last: int = 1,
    chunk: int = 4096,
    padding: Tensor | Sequence[int] | None = None,
    reading: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Fill the caches with a prompt and return the last layer's output for its last positions.

    One chunk at a time goes through all layers, so that memory is that of a chunk and of what the caches keep. In the
    last layer, or the last `reading` ones, only the queries asked for are computed; of the other positions keys and
    values alone are taken. Their caches therefore learn nothing about queries, and forget nothing until they come,
    unless they have a `content_spread`.

    Args:
        layers: each is called as `layer(x, cache, rows)`, x `[B, M, C]`, calls `cache.attend` with the queries of the
            last `rows` positions and the keys and values of all, and returns its output for those rows.
        caches: one for each layer, empty or with the positions that precede the prompt.
        prompt: tokens `[B, N]` or hidden states `[B, N, C]`, or a sequence of such without B, all of one length.
        embed: from tokens to hidden states; None if the prompt is hidden states.
        last: for how many of the last positions the output is wanted.
        chunk: positions at a time.
        padding: how many of the first positions of each sequence are padding.
        reading: how many of the last layers make their keys and values of the same hidden states, so that only the
            positions asked for go through them. All but the first of these are called as
            `layer(x, cache, rows, memory)`, memory `[B, M, C]` being what the first was given.
        progress: called with the number of positions read after each chunk.
    """
    prompt = _one_tensor(prompt)
    length = prompt.shape[1]
    if len(layers) != len(caches) or not layers:
        raise ValueError(f"there are {len(layers)} layers and {len(caches)} caches; each layer needs one of its own")
    if not 0 < last <= length:
        raise ValueError(f"last is {last} and the prompt has {length:,} positions; ask for 1 to {length:,}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 position")
    if len({cache.length for cache in caches}) > 1:
        raise ValueError(
            f"the caches have {[cache.length for cache in caches]} positions; they must have the same number"
        )
    if not 1 <= reading <= len(layers):
        raise ValueError(f"reading is {reading} and there are {len(layers)} layers; 1 to {len(layers)} can read")
    first = len(layers) - reading
    for cache in caches:
        if padding is not None:
            cache.pad_left(padding)
        cache.reserve(cache.length + length + 1)

    wanted = []
    with torch.no_grad():
        for start in range(0, length, chunk):
            x = prompt[:, start : start + chunk]
            stop = start + x.shape[1]
            asked = min(x.shape[1], max(0, stop - (length - last)))
            x = x if embed is None else embed(x)
            for layer, cache in zip(layers[:first], caches[:first], strict=True):
                x = layer(x, cache, x.shape[1])
            memory = x
            x = layers[first](x, caches[first], asked)
            for layer, cache in zip(layers[first + 1 :], caches[first + 1 :], strict=True):
                x = layer(x, cache, asked, memory)
            if asked:
                wanted.append(x)
            if progress is not None:
                progress(stop)
    return torch.cat(wanted, 1)


def _one_tensor(prompt: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (2, 3):
            raise ValueError(
                f"the prompt has shape {list(prompt.shape)}; [batch, tokens] or [batch, tokens, size] is needed"
            )
        return prompt
    lengths = sorted({len(part) for part in prompt})
    if len(lengths) != 1:
        raise ValueError(
            f"the prompts have {lengths} tokens; pad them on the left to one length and say how much with padding=, or "
            "read them one by one"
        )
    return torch.stack(list(prompt))
