"""Read a prompt of any length in chunks, through a decoder whose layers have caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesattn.attention.cache.layer_cache import LayerCache


def prefill(
    decoder: Callable[[Tensor, int], Tensor],
    caches: Sequence[LayerCache],
    prompt: Tensor | Sequence[Tensor],
    *,
    last: int = 1,
    chunk: int = 4096,
    padding: Tensor | Sequence[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Fill the caches with a prompt and return the decoder's output for its last positions, `[B, last, …]`.

    One chunk at a time goes through all layers, so that memory is that of a chunk and of what the caches keep. The
    output is wanted for few positions. A decoder saves time if its last layer computes the queries of these alone, and
    of the other positions only keys and values. The cache of such a layer learns nothing about queries until they come,
    so it evicts nothing before, unless it has a `content_spread`.

    Args:
        decoder: called once per chunk as `decoder(part, num_rows)`, `part` being the next positions of the prompt. It
            puts them through all layers, which call `attend` of their caches, and returns the last layer's output
            for the last `num_rows` positions of the chunk. `num_rows` may be 0; the output is then not used.
        caches: those of the layers, empty or with the positions that precede the prompt.
        prompt: tokens `[B, N]` or hidden states `[B, N, C]`, or a sequence of such without B, all of one length.
        last: for how many of the last positions the output is wanted.
        chunk: positions at a time.
        padding: how many of the first positions of each sequence are padding.
        progress: called with the number of positions read after each chunk.
    """
    prompt = _one_tensor(prompt)
    length = prompt.shape[1]
    if not 0 < last <= length:
        raise ValueError(f"last is {last} and the prompt has {length:,} positions; 1 to {length:,} are allowed")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 position")
    if len({cache.length for cache in caches}) > 1:
        raise ValueError(
            f"the caches have {[cache.length for cache in caches]} positions; they must have the same number"
        )
    for cache in caches:
        if padding is not None:
            cache.pad_left(padding)
        cache.reserve(cache.length + length + 1)

    outputs = []
    with torch.no_grad():
        for start in range(0, length, chunk):
            part = prompt[:, start : start + chunk]
            stop = start + part.shape[1]
            num_rows = min(part.shape[1], max(0, stop - (length - last)))
            output = decoder(part, num_rows)
            if num_rows:
                outputs.append(output)
            if progress is not None:
                progress(stop)
    return torch.cat(outputs, 1)


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
            f"the prompts have {lengths} tokens; pad them on the left to one length and pass padding=, or read them "
            "one by one"
        )
    return torch.stack(list(prompt))
