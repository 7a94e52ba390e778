"""A prompt read in chunks gives what one pass gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba
from tests.attention.cache.sequences import contents


class Block(nn.Module):
    """A small attention layer with a residual."""

    def __init__(self, prior: ba.Prior, size: int = 8) -> None:
        super().__init__()
        self.prior, self.heads = prior, prior.num_heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, cache: ba.LayerCache | None = None, num_rows: int | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if cache is None:
            return x + self.out(ba.bayesian_attention(q, k, v, self.prior).transpose(1, 2).flatten(2))
        first = 0 if num_rows is None else x.shape[1] - num_rows
        attended = cache.attend(q[:, :, first:], k, v)
        return x[:, first:] + self.out(attended.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """A decoder as `prefill` calls it: only its last layer is asked for the rows wanted alone."""

    def __init__(self, *priors: ba.Prior, content_spread: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(prior) for prior in priors)
        self.caches = [ba.LayerCache(prior, content_spread=content_spread) for prior in priors]
        self.calls: list[tuple[int, int]] = []

    def one_pass(self, prompt: Tensor) -> Tensor:
        x = prompt if prompt.is_floating_point() else self.embed(prompt)
        for block in self.blocks:
            x = block(x)
        return x.detach()

    def forward(self, part: Tensor, num_rows: int) -> Tensor:
        self.calls.append((part.shape[1], num_rows))
        x = part if part.is_floating_point() else self.embed(part)
        for block, cache in zip(self.blocks[:-1], self.caches, strict=False):
            x = block(x, cache)
        return self.blocks[-1](x, self.caches[-1], num_rows)


def make_stack() -> Stack:
    torch.manual_seed(0)
    return Stack(*(ba.GeneralizedGaussian.from_shape([1.0, beta], [1.0, 3.0]) for beta in (1.0, 0.5, -0.5)))


@pytest.mark.parametrize(
    ("chunk", "last"),
    [(1, 1), (64, 1), (64, 5), (64, 700), (250, 1), (250, 5), (250, 700), (4096, 1), (4096, 5), (4096, 700)],
)
def test_chunks_give_what_one_pass_gives(chunk: int, last: int) -> None:
    stack = make_stack()
    tokens = torch.randint(11, (2, 700))
    progress: list[int] = []
    out = ba.prefill(stack, stack.caches, tokens, last=last, chunk=chunk, progress=progress.append)
    torch.testing.assert_close(out, stack.one_pass(tokens)[:, -last:], atol=1e-5, rtol=1e-5)
    assert progress[-1] == 700
    assert all(cache.length == 700 for cache in stack.caches)


@pytest.mark.parametrize(
    ("last", "calls"),
    [
        (1, [(40, 0), (40, 0), (20, 1)]),
        (20, [(40, 0), (40, 0), (20, 20)]),
        (25, [(40, 0), (40, 5), (20, 20)]),
        (100, [(40, 40), (40, 40), (20, 20)]),
    ],
)
def test_the_decoder_is_asked_for_the_last_rows_alone(last: int, calls: list[tuple[int, int]]) -> None:
    stack = make_stack()
    out = ba.prefill(stack, stack.caches, torch.randint(11, (2, 100)), last=last, chunk=40)
    assert stack.calls == calls
    assert out.shape == (2, last, 8)


def test_two_prompts_in_a_row_continue() -> None:
    stack = make_stack()
    x = torch.randn(1, 300, 8)
    ba.prefill(stack, stack.caches, x[:, :200], chunk=64)
    out = ba.prefill(stack, stack.caches, [x[0, 200:]], chunk=64, last=3)
    torch.testing.assert_close(out, stack.one_pass(x)[:, -3:], atol=1e-5, rtol=1e-5)


def test_left_padding_changes_nothing() -> None:
    stack = make_stack()
    x = torch.randn(1, 300, 8)
    padded = torch.cat([torch.full((1, 40, 8), 9.0), x], 1)
    both = torch.cat([torch.randn(1, 340, 8), padded])
    out = ba.prefill(stack, stack.caches, both, padding=[0, 40], chunk=100)
    torch.testing.assert_close(out[1:], stack.one_pass(x)[:, -1:], atol=1e-5, rtol=1e-5)


def test_local_layers_keep_little_of_a_long_prompt() -> None:
    torch.manual_seed(0)
    stack = Stack(*(ba.Laplace(2, slopes=[0.5, 1.0]) for _ in range(2)), content_spread=20.0)
    ba.prefill(stack, stack.caches, torch.randn(1, 20_000, 8), chunk=1000)
    assert all(cache.bytes < 0.02 * cache.full_bytes for cache in stack.caches)


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("already", [0, 300])
def test_an_error_in_the_middle_of_a_prompt_takes_all_of_it_back(error: BaseException, already: int) -> None:
    torch.manual_seed(0)
    stack = Stack(*(ba.Laplace(2, slopes=[0.5, 1.0]) for _ in range(2)), content_spread=20.0)
    x = torch.randn(2, 1000, 8)
    if already:
        ba.prefill(stack, stack.caches, x[:, :already])
    before = [contents(cache) for cache in stack.caches]

    def interrupt(read: int) -> None:
        if read > 500:
            raise error

    with pytest.raises(type(error)):
        ba.prefill(
            stack, stack.caches, x[:, already:], chunk=100, progress=interrupt, padding=None if already else [3, 0]
        )
    assert [contents(cache) for cache in stack.caches] == before
    out = ba.prefill(stack, stack.caches, x[:, already:], chunk=100)
    torch.testing.assert_close(out, stack.one_pass(x)[:, -1:], atol=1e-5, rtol=1e-5)


def test_a_layer_that_fails_takes_back_what_the_layers_before_it_read() -> None:
    stack = make_stack()
    x = torch.randn(1, 100, 8)
    before = [contents(cache) for cache in stack.caches]
    x[0, 60] = torch.nan
    with pytest.raises(ValueError, match="has NaN or infinite entries"):
        ba.prefill(stack, stack.caches, x, chunk=50)
    assert [contents(cache) for cache in stack.caches] == before


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "the decoder returned a NoneType; a tensor is needed"),
        (torch.zeros(1, 3, 8), r"the decoder returned shape \[1, 3, 8\]; the last 1 positions of 1 sequences"),
        (torch.zeros(1), r"the decoder returned shape \[1\]; the last 1 positions of 1 sequences"),
    ],
    ids=["nothing", "all rows", "no rows"],
)
def test_a_decoder_that_returns_something_else_gets_one_sentence(output: Any, message: str) -> None:
    stack = make_stack()

    def decoder(part: Tensor, num_rows: int) -> Any:
        stack(part, num_rows)
        return output

    with pytest.raises((TypeError, ValueError), match=message):
        ba.prefill(decoder, stack.caches, X)
    assert all(cache.length == 0 for cache in stack.caches)


def test_one_cache_for_two_layers_is_noticed() -> None:
    stack = make_stack()
    first, second, _ = stack.caches
    with pytest.raises(ValueError, match="the 3 caches are 2 different ones; each layer needs its own"):
        ba.prefill(stack, [first, second, first], X)
    assert first.length == 0


X = torch.randn(1, 10, 8)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([X[0], X[0, :5]], {}, r"the prompts have \[5, 10\] tokens; pad them on the left"),
        (X[0, 0], {}, r"the prompt has shape \[8\]; \[batch, tokens\] or \[batch, tokens, size\] is needed"),
        (X, {"last": 11}, "last is 11 and the prompt has 10 positions; 1 to 10 are allowed"),
        (X, {"last": 0}, "last is 0 and the prompt has 10 positions"),
        (X, {"chunk": 0}, "chunk is 0; it must be at least 1 position"),
    ],
    ids=["lengths", "shape", "too many", "none", "chunk"],
)
def test_a_mistake_gets_one_sentence(prompt: Any, settings: dict[str, Any], message: str) -> None:
    stack = make_stack()
    with pytest.raises(ValueError, match=message):
        ba.prefill(stack, stack.caches, prompt, **settings)


def test_caches_of_different_lengths_are_noticed() -> None:
    stack = make_stack()
    stack.blocks[0](X, stack.caches[0])
    with pytest.raises(ValueError, match=r"the caches have \[10, 0, 0\] positions; they must have the same number"):
        ba.prefill(stack, stack.caches, X)
