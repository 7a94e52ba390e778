"""A byte-level GPT in plain PyTorch: trained on 64 bytes, read at 1,024. About half a minute on a CPU.

python examples/train_text.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesattn as ba
from bayesattn.data.text import BUNDLED, documents

CONTEXT, DIM, HEADS, LAYERS, BATCH = 64, 96, 6, 3, 32


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        prior = ba.GeneralizedGaussian(HEADS, "spread", epsilon=1.0)
        self.attention = ba.BayesianSelfAttention(DIM, HEADS, prior=prior, query_scale=ba.ScalableSoftmax(HEADS))
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])

    def forward(self, x: Tensor, cache: ba.LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), cache=cache)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """No positional embeddings: the priors know about positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor, caches: list[ba.LayerCache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int) -> bytes:
        """The likeliest bytes after a prompt, one at a time with a cache."""
        caches = [block.attention.make_cache() for block in self.blocks]
        tokens = torch.tensor([list(prompt)])
        text = list(prompt)
        for _ in range(length):
            tokens = self(tokens, caches)[:, -1:].argmax(-1)
            text.append(int(tokens))
        return bytes(text)


def batch(text: Tensor, length: int, number: int) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the byte that follows each of theirs."""
    starts = torch.randint(len(text) - length - 1, (number,))
    pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def bits_per_byte(model: GPT, text: Tensor, length: int) -> float:
    """Of the last bytes of pieces of this length, as many as there are in a training context."""
    tokens, following = batch(text, length, 4096 // CONTEXT)
    logits = model(tokens)[:, -CONTEXT:]
    return cross_entropy(logits.flatten(0, 1), following[:, -CONTEXT:].flatten()).item() / 0.6931


def main(steps: int = 200, lengths: tuple[int, ...] = (64, 256, 1024)) -> dict[int, float]:
    """Train, and return the bits per byte of unseen text at each length."""
    torch.manual_seed(0)
    train, unseen = (
        torch.tensor(list("\n".join(documents(BUNDLED, split)).encode())) for split in ("train", "held-out")
    )
    model = GPT()
    prior = [p for name, p in model.named_parameters() if ".prior." in name or ".query_scale." in name]
    others = [p for name, p in model.named_parameters() if ".prior." not in name and ".query_scale." not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": prior, "weight_decay": 0.0, "lr": 1e-2}], lr=3e-3)
    for step in range(steps):
        tokens, following = batch(train, CONTEXT, BATCH)
        loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()
    print(*model.blocks[-1].attention.prior.describe(1024), sep="\n")
    print(model.generate(b"The ", 40).decode(errors="replace"))
    bits = {length: bits_per_byte(model, unseen, length) for length in lengths}
    print(*(f"{length:5d} bytes: {value:.2f} bits per byte" for length, value in bits.items()), sep="\n")
    return bits


if __name__ == "__main__":
    main()
