"""What benchmarks of attention compute on: random sequences with a learned prior, and the error against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import bayesattn as ba
from bayesattn.compute.device import device_memory

Attend = Callable[[], Tensor]

# The last queries, which see most keys, are compared with the float64 reference.
CHECKED_QUERIES = 128
# Relative error of float32 against float64; a tolerance of 1e-6 adds less than a hundredth of this. A wrong mask,
# distance or scale gives more than a hundred times this.
LARGEST_ERROR = 1e-4
# Numbers of float32 that training holds for each number of the queries, and matrices of the reference; rounded up.
COPIES, MATRICES = 20, 8
SHARE_OF_MEMORY = 0.6


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem; sequences of several documents are packed, as in training."""

    batch: int
    heads: int
    key_heads: int
    tokens: int
    head_size: int
    documents: int = 1

    @staticmethod
    def parse(text: str) -> Shape:
        """`16x4x128x32`: batch × heads × tokens × head size. `8:2` for 8 heads is two key heads, `/4` four documents.

        Raises:
            ValueError: that is no shape, or one that does not fit in this machine's memory.
        """
        sizes = re.fullmatch(r"(\d+)x(\d+)(?::(\d+))?x(\d+)x(\d+)(?:/(\d+))?", text.strip(), re.ASCII)
        if sizes is None or max(len(size or "") for size in sizes.groups()) > 9:
            raise ValueError(text)
        batch, heads, key_heads, tokens, head_size, documents = sizes.groups()
        shape = Shape(int(batch), int(heads), int(key_heads or heads), int(tokens), int(head_size), int(documents or 1))
        if not shape._is_possible() or shape._bytes() > device_memory() * SHARE_OF_MEMORY:
            raise ValueError(text)
        return shape

    def __str__(self) -> str:
        heads = str(self.heads) if self.key_heads == self.heads else f"{self.heads}:{self.key_heads}"
        documents = f"/{self.documents}" if self.documents > 1 else ""
        return f"{self.batch}x{heads}x{self.tokens}x{self.head_size}{documents}"

    def _is_possible(self) -> bool:
        sizes = (self.batch, self.heads, self.key_heads, self.tokens, self.head_size, self.documents)
        return min(sizes) > 0 and self.heads % self.key_heads == 0 and self.documents <= self.tokens

    def _bytes(self) -> int:
        checked = min(self.tokens, CHECKED_QUERIES)
        rows = self.batch * self.heads
        return rows * self.tokens * (4 * COPIES * self.head_size + 8 * MATRICES * checked)


@dataclass(frozen=True)
class Inputs:
    """Random sequences and a learned prior with heavy-tailed, flat and retrieval heads.

    In none of these heads does the weight of a key vanish. So nothing is pruned, and all methods do the same work.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    prior: ba.GeneralizedGaussian
    scale: ba.ScalableSoftmax
    document_ids: Tensor | None = None

    @staticmethod
    def make(shape: Shape, seed: int = 0) -> Inputs:
        torch.manual_seed(seed)
        q = torch.randn(shape.batch, shape.heads, shape.tokens, shape.head_size)
        k, v = torch.randn(2, shape.batch, shape.key_heads, shape.tokens, shape.head_size)
        prior = learned_prior(shape.heads)
        return Inputs(q, k, v, prior, ba.ScalableSoftmax(shape.heads, init=0.3), _documents(shape))

    def trainable(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.prior.parameters(), *self.scale.parameters()]

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all sequences of one head."""
        batch, _, tokens, _ = self.q.shape
        if self.document_ids is None:
            return batch * tokens * (tokens + 1) // 2
        lengths = torch.cat([torch.bincount(ids) for ids in self.document_ids])
        return int((lengths * (lengths + 1) // 2).sum())

    def attend(self, scaled: bool = True) -> Tensor:
        """Our attention."""
        scale = self.scale if scaled else None
        return ba.bayesian_attention(
            self.q, self.k, self.v, self.prior, query_scale=scale, document_ids=self.document_ids
        )


def learned_prior(heads: int) -> ba.GeneralizedGaussian:
    """Heavy-tailed, flat and retrieval heads: none loses a key."""
    betas = torch.linspace(0.5, -1.0, heads).tolist()
    return ba.GeneralizedGaussian.from_shape(betas, [8.0] * heads, epsilon=1.0)


def training(attend: Attend, inputs: Inputs) -> Callable[[], object]:
    """Forward and backward: the gradients of all inputs that the method uses."""
    gradient, trainable = torch.randn_like(inputs.q), inputs.trainable()

    def work() -> object:
        for tensor in trainable:
            tensor.requires_grad_()
        return torch.autograd.grad(attend(), trainable, gradient, allow_unused=True)

    return work


def error(attend: Attend, inputs: Inputs, *, scaled: bool, gradients: bool) -> float:
    """Largest relative error of the checked queries, and of their gradients, against the float64 reference."""
    with torch.set_grad_enabled(gradients):
        expected = _solution(lambda: _reference(inputs, scaled), inputs, gradients)
        actual = _solution(attend, inputs, gradients)
    errors = [(a - b).norm() / b.norm() for a, b in zip(actual, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN if one of them is


def _reference(inputs: Inputs, scaled: bool) -> Tensor:
    prior, scale = inputs.prior, inputs.scale
    return ba.bayesian_attention(
        inputs.q[:, :, -CHECKED_QUERIES:].double(),
        inputs.k.double(),
        inputs.v.double(),
        prior(torch.arange(inputs.k.shape[2], dtype=torch.float64)),
        query_scale=(lambda counts: scale(counts.double())) if scaled else None,
        document_ids=inputs.document_ids,
        implementation="reference",
    )


def _solution(attend: Attend, inputs: Inputs, gradients: bool) -> list[Tensor]:
    if not gradients:
        return [attend()[:, :, -CHECKED_QUERIES:].double()]
    trainable = inputs.trainable()
    for tensor in trainable:
        tensor.requires_grad_()
    out = attend()[:, :, -CHECKED_QUERIES:].double()
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [out.detach(), *(g.double() for g in torch.autograd.grad(out, trainable, gradient, materialize_grads=True))]


def _documents(shape: Shape) -> Tensor | None:
    """Documents of random lengths, other ones in each sequence."""
    if shape.documents == 1:
        return None
    begins = torch.zeros(shape.batch, shape.tokens, dtype=torch.long)
    for row in begins:
        row[1 + torch.randperm(shape.tokens - 1)[: shape.documents - 1]] = 1
    return begins.cumsum(1)
