"""Read a prompt of any length in chunks, through a decoder whose layers have caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesattn.attention.cache.layer_cache import LayerCache, unchanged_on_error
from bayesattn.attention.problem import MOST_COUNTED
from bayesattn.errors import is_whole, shown


def prefill(
    decoder: Callable[[Tensor, int], Tensor],
    caches: Sequence[LayerCache],
    prompt: Tensor | Sequence[Tensor],
    *,
    last: int = 1,
    chunk: int = 8192,
    padding: Tensor | Sequence[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Fill the caches with a prompt and return the decoder's output for its last positions, `[B, last, …]`.

    One chunk at a time goes through all layers, so that memory is that of a chunk and of what the caches keep. The
    output is wanted for few positions. A decoder saves time if its last layer computes the queries of these alone, and
    of the other positions only keys and values. The cache of such a layer learns nothing about queries until they come,
    so it evicts nothing before, unless it has a `content_spread`.

    If the decoder or a cache raises an error, the caches are what they were before the prompt. A decoder must not take
    tokens back (`crop`).

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
    length, caches = prompt.shape[1], _checked(caches)
    if not is_whole(last, 1, length):
        raise ValueError(f"last is {shown(last)} and the prompt has {length:,} positions; 1 to {length:,} are allowed")
    if not is_whole(chunk, 1, MOST_COUNTED):
        raise ValueError(f"chunk is {shown(chunk)}; it must be at least 1 position, a whole number")
    for name, function in (("decoder", decoder), ("progress", progress)):
        if not callable(function) and (function is not None or name == "decoder"):
            raise TypeError(f"{name} is {shown(function)}; a function is needed")

    outputs = []
    with unchanged_on_error(caches), torch.no_grad():
        for cache in caches:
            if padding is not None:
                cache.pad_left(padding)
            cache.reserve(cache.length + length + 1)
        before = caches[0].length
        for start in range(0, length, chunk):
            part = prompt[:, start : start + chunk]
            stop = start + part.shape[1]
            num_rows = min(part.shape[1], max(0, stop - (length - last)))
            output = decoder(part, num_rows)
            _check_read(caches, before + stop)
            if num_rows:
                outputs.append(_checked_output(output, part, num_rows))
            if progress is not None:
                progress(stop)
        return torch.cat(outputs, 1)


def _checked(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """The caches, each of one layer, all of one length."""
    given = list(caches) if isinstance(caches, Sequence) else []
    if not given or not all(isinstance(cache, LayerCache) for cache in given):
        kinds = sorted({type(cache).__name__ for cache in given}) or [type(caches).__name__]
        raise TypeError(f"caches are of the type {shown(', '.join(kinds))}; a sequence of LayerCaches is needed")
    if len(set(map(id, given))) < len(given):
        raise ValueError(
            f"the {len(given)} caches are {len(set(map(id, given)))} different ones; each layer needs its own"
        )
    if len({cache.length for cache in given}) > 1:
        raise ValueError(
            f"the caches have {shown([cache.length for cache in given])} positions; they must have the same number"
        )
    return given


def _check_read(caches: Sequence[LayerCache], length: int) -> None:
    """Raise an error if the decoder did not give its tokens to each cache."""
    for number, cache in enumerate(caches):
        if cache.length != length:
            raise ValueError(
                f"after the decoder cache {number} has {cache.length:,} positions and {length:,} of the prompt and "
                "before are read; the decoder must give each cache the tokens of its part once"
            )


def _checked_output(output: object, part: Tensor, num_rows: int) -> Tensor:
    """The decoder's output for the last positions of a chunk, or an error."""
    if not isinstance(output, Tensor):
        raise TypeError(f"the decoder returned a {type(output).__name__}; a tensor is needed")
    if output.dim() < 2 or output.shape[:2] != (len(part), num_rows):
        raise ValueError(
            f"the decoder returned shape {list(output.shape)}; the last {num_rows} positions of {len(part)} sequences, "
            f"[{len(part)}, {num_rows}, …], are needed"
        )
    return output


def _one_tensor(prompt: Tensor | Sequence[Tensor]) -> Tensor:
    """`[B, N]` or `[B, N, C]` with N at least 1, or an error."""
    if not isinstance(prompt, Tensor):
        prompt = _stack(prompt)
    if prompt.dim() not in (2, 3):
        raise ValueError(
            f"the prompt has shape {list(prompt.shape)}; [batch, tokens] or [batch, tokens, size] is needed"
        )
    if 0 in prompt.shape[:2]:
        raise ValueError(
            f"the prompt has shape {list(prompt.shape)}; at least one sequence of at least one token is needed"
        )
    return prompt


def _stack(prompts: Sequence[Tensor]) -> Tensor:
    parts = list(prompts) if isinstance(prompts, Sequence) else []
    if not parts or not all(isinstance(part, Tensor) and part.dim() in (1, 2) for part in parts):
        raise TypeError(
            f"the prompt is {shown(prompts)}; a tensor, or a sequence of tensors [tokens] or [tokens, size], is needed"
        )
    lengths = sorted({len(part) for part in parts})
    if len(lengths) != 1:
        raise ValueError(
            f"the prompts have {shown(lengths)} tokens; pad them on the left to one length and pass padding=, or read "
            "them one by one"
        )
    if len({(part.shape, part.dtype, part.device) for part in parts}) > 1:
        kinds = [f"{part.dtype} {list(part.shape)}" for part in parts]
        raise ValueError(f"the prompts are {shown(kinds)}; shapes, dtypes and devices must agree")
    return torch.stack(parts)
