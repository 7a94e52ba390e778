"""A prompt read in chunks gives what one pass gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba


class Block(nn.Module):
    """A small attention layer with a residual, as `prefill` calls it."""

    def __init__(self, prior: ba.Prior, size: int = 8) -> None:
        super().__init__()
        self.prior, self.heads = prior, prior.num_heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.rows: list[int] = []

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def forward(
        self, x: Tensor, cache: ba.LayerCache | None = None, rows: int | None = None, memory: Tensor | None = None
    ) -> Tensor:
        q, (_, k, v) = self.split(x)[0], self.split(x if memory is None else memory)
        if cache is None:
            attended = ba.bayesian_attention(q, k, v, self.prior)
            rows = x.shape[1]
        else:
            assert rows is not None
            self.rows.append(rows)
            attended = cache.attend(q[:, :, x.shape[1] - rows :], k, v)
        return x[:, x.shape[1] - rows :] + self.out(attended.transpose(1, 2).flatten(2))


@pytest.fixture
def stack() -> list[Block]:
    torch.manual_seed(0)
    return [Block(ba.GeneralizedGaussian.from_shape([1.0, beta], [1.0, 3.0])) for beta in (1.0, 0.5, -0.5)]


@pytest.mark.parametrize("last", [1, 5, 700])
@pytest.mark.parametrize("chunk", [1, 64, 250, 4096])
def test_chunks_give_what_one_pass_gives(stack: list[Block], chunk: int, last: int) -> None:
    if chunk == 1 and last != 1:
        pytest.skip("long")
    embed = nn.Embedding(11, 8)
    tokens = torch.randint(11, (2, 700))
    with torch.no_grad():
        whole = embed(tokens)
        for block in stack:
            whole = block(whole)
    caches = [ba.LayerCache(block.prior) for block in stack]
    read: list[int] = []
    out = ba.prefill(stack, caches, tokens, embed=embed, last=last, chunk=chunk, progress=read.append)
    torch.testing.assert_close(out, whole[:, -last:], atol=1e-5, rtol=1e-5)
    assert sum(stack[-1].rows) == last
    assert read[-1] == 700
    assert all(cache.length == 700 for cache in caches)


def test_two_prompts_in_a_row_continue(stack: list[Block]) -> None:
    x = torch.randn(1, 300, 8)
    with torch.no_grad():
        whole = x
        for block in stack:
            whole = block(whole)
    caches = [ba.LayerCache(block.prior) for block in stack]
    ba.prefill(stack, caches, x[:, :200], chunk=64)
    out = ba.prefill(stack, caches, [x[0, 200:]], chunk=64, last=3)
    torch.testing.assert_close(out, whole[:, -3:], atol=1e-5, rtol=1e-5)


def test_left_padding_changes_nothing(stack: list[Block]) -> None:
    x = torch.randn(1, 300, 8)
    alone = ba.prefill(stack, [ba.LayerCache(block.prior) for block in stack], x)
    padded = torch.cat([torch.full((1, 40, 8), 9.0), x], 1)
    both = torch.cat([torch.randn(1, 340, 8), padded])
    out = ba.prefill(stack, [ba.LayerCache(block.prior) for block in stack], both, padding=[0, 40], chunk=100)
    torch.testing.assert_close(out[1:], alone, atol=1e-5, rtol=1e-5)


def test_local_layers_keep_little_of_a_long_prompt() -> None:
    torch.manual_seed(0)
    stack = [Block(ba.Laplace(2, slopes=[0.5, 1.0])) for _ in range(2)]
    caches = [ba.LayerCache(block.prior, content_spread=20.0) for block in stack]
    ba.prefill(stack, caches, torch.randn(1, 20_000, 8), chunk=1000)
    assert all(cache.bytes < 0.02 * cache.full_bytes for cache in caches)


@pytest.mark.parametrize("reading", [2, 3])
@pytest.mark.parametrize("last", [1, 70])
def test_layers_that_read_the_same_are_asked_for_the_last_rows_alone(
    stack: list[Block], reading: int, last: int
) -> None:
    x = torch.randn(2, 300, 8)
    caches = [ba.LayerCache(block.prior) for block in stack]
    with torch.no_grad():
        out = ba.prefill(stack, caches, x, last=last, chunk=64, reading=reading)
        for block in stack[: 3 - reading]:
            x = block(x)
        memory = x
        for block in stack[3 - reading :]:
            x = block(x, memory=memory)
    torch.testing.assert_close(out, x[:, -last:], atol=1e-5, rtol=1e-5)
    assert [sum(block.rows) for block in stack] == [300] * (3 - reading) + [last] * reading
    assert all(cache.length == 300 for cache in caches)


def test_wrong_calls_get_one_sentence(stack: list[Block]) -> None:
    caches = [ba.LayerCache(block.prior) for block in stack]
    x = torch.randn(1, 10, 8)
    with pytest.raises(ValueError, match=r"the prompts have \[5, 10\] tokens; pad them on the left"):
        ba.prefill(stack, caches, [x[0], x[0, :5]])
    with pytest.raises(ValueError, match="there are 3 layers and 2 caches"):
        ba.prefill(stack, caches[:2], x)
    with pytest.raises(ValueError, match="last is 11 and the prompt has 10 positions"):
        ba.prefill(stack, caches, x, last=11)
    with pytest.raises(ValueError, match="reading is 4 and there are 3 layers; 1 to 3 can read"):
        ba.prefill(stack, caches, x, reading=4)
    with pytest.raises(ValueError, match="chunk is 0"):
        ba.prefill(stack, caches, x, chunk=0)
    with pytest.raises(ValueError, match=r"\[batch, tokens\]"):
        ba.prefill(stack, caches, x[0, 0])
    stack[0](x, caches[0], 10)
    with pytest.raises(ValueError, match=r"the caches have \[10, 0, 0\] positions"):
        ba.prefill(stack, caches, x)
