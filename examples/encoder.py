"""An encoder in plain PyTorch: attention in both directions whose priors learn how far to look. About ten seconds.

Each position says what most of its neighbours have, two places in both directions. The model is trained on 32 positions
and reads 512, with padding.

    python examples/encoder.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import bayesattn as ba

DIM, HEADS, REACH, SYMBOLS, PADDING = 32, 4, 2, 2, 2


class Encoder(nn.Module):
    """One layer of attention without a mask, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        prior = ba.GeneralizedGaussian.from_shape([1.0] * HEADS, [8.0] * HEADS, epsilon=1.0)
        self.embedding = nn.Embedding(SYMBOLS + 1, DIM, padding_idx=PADDING)
        self.attention = ba.BayesianSelfAttention(DIM, HEADS, prior=prior, causal=False)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, SYMBOLS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        documents = torch.where(tokens == PADDING, -1, 0)  # padding sees nothing and is not seen
        return self.mlp(self.norm(x + self.attention(x, document_ids=documents)))


def examples(length: int, number: int) -> tuple[Tensor, Tensor]:
    """Symbols `[number, length]` of texts of different lengths with padding after them, and the answers, −100 there."""
    tokens = torch.randint(SYMBOLS, (number, length))
    ends = torch.randint(length // 2, length + 1, (number, 1))
    outside = torch.arange(length) >= ends
    signs = (2 * tokens - 1).masked_fill(outside, 0)
    sums = pad(signs, (REACH, REACH)).unfold(-1, 2 * REACH + 1, 1).sum(-1)
    answers = torch.where(sums == 0, tokens, (sums > 0).long()).masked_fill(outside, -100)
    return tokens.masked_fill(outside, PADDING), answers


@torch.no_grad()
def accuracy(model: Encoder, length: int) -> float:
    """Share of right answers."""
    tokens, answers = examples(length, 16)
    right = model(tokens).argmax(-1) == answers
    return (right.sum() / (answers >= 0).sum()).item()


def main(steps: int = 400, lengths: tuple[int, ...] = (32, 128, 512)) -> dict[int, float]:
    """Train, and return the share of right answers at each length."""
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        tokens, answers = examples(32, 32)
        loss = cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()
    print(*model.attention.prior.describe(64), sep="\n")
    shares = {length: accuracy(model, length) for length in lengths}
    print(*(f"{length:4d} positions: {share:.1%} right" for length, share in shares.items()), sep="\n")
    return shares


if __name__ == "__main__":
    main()
