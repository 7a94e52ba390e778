"""Random checkpoints of the BAM authors' models, and their forward pass, derived again from the formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": None, "vocab_size": 50, "multiple_of": 12,
    "ffn_dim_multiplier": 2, "norm_eps": 1e-5, "max_seq_len": 24, "mlp_width": 8,
}  # fmt: skip
OLD_NAMES = {"theta_alpha": "scale", "theta_beta": "shape", "theta_mu": "loc"}


def random_weights(encoding: str, shared: bool = False, **changes: Any) -> dict[str, Tensor]:
    """A state dict with the published names."""
    size = SIZES | changes
    dim, heads, vocabulary = size["dim"], size["n_heads"], size["vocab_size"]
    width, kv_dim = math.ceil(2 * dim / size["multiple_of"]) * size["multiple_of"], dim
    if size["n_kv_heads"]:
        kv_dim = dim // heads * size["n_kv_heads"]
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int, about: float = 0.0, spread: float = 1.0) -> Tensor:
        return about + spread * torch.randn(*shape, generator=draw)

    def prior() -> dict[str, Tensor]:
        return {f"theta_{name}": random(1, heads, 1, 1, spread=0.5) for name in ("alpha", "beta", "mu")}

    weights = {"tok_embeddings.weight": random(vocabulary, dim)}
    for layer in range(size["n_layers"]):
        at = f"layers.{layer}."
        for name, rows in (("wq", dim), ("wk", kv_dim), ("wv", kv_dim), ("wo", dim)):
            weights[f"{at}attention.{name}.weight"] = random(rows, dim, spread=dim**-0.5)
        for name, shape in (("w1", (width, dim)), ("w3", (width, dim)), ("w2", (dim, width))):
            weights[f"{at}feed_forward.{name}.weight"] = random(*shape, spread=shape[1] ** -0.5)
        for name in ("attention_norm", "ffn_norm"):
            weights[f"{at}{name}.weight"] = random(dim, about=1.0, spread=0.2)
        if encoding.endswith("ssmax"):
            weights[f"{at}attention.seq_scale"] = random(1, heads, 1, about=1.0, spread=0.3)
        if encoding.startswith("cabam"):
            for number, rows, columns in ((0, 8, dim), (2, 3 * heads, 8)):
                weights[f"{at}attention.prior.mlp.{number}.weight"] = random(rows, columns, spread=0.3)
                weights[f"{at}attention.prior.mlp.{number}.bias"] = random(rows, spread=0.3)
        if encoding.startswith("bam") and not shared:
            weights |= {f"{at}attention.prior.{name}": value for name, value in prior().items()}
    if encoding.startswith("bam") and shared:
        weights |= {f"prior.{name}": value for name, value in prior().items()}
    return weights | {"norm.weight": random(dim, about=1.0, spread=0.2), "output.weight": random(vocabulary, dim)}


def save(folder: Path, encoding: str, weights: dict[str, Tensor], prefix: str = "", **changes: Any) -> Path:
    """model.pt and args.json in a folder."""
    folder.mkdir(exist_ok=True)
    torch.save({prefix + name: value for name, value in weights.items()}, folder / "model.pt")
    content = {"args": {"position_encoding": encoding}, "dataset_args": {}, "model_args": SIZES | changes}
    (folder / "args.json").write_text(json.dumps(content))
    return folder


def with_old_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with the names of earlier checkpoints."""
    renamed = {}
    for name, value in weights.items():
        start, _, kind = name.rpartition(".")
        renamed[f"{start}.{OLD_NAMES.get(kind, kind)}"] = value
    return renamed


def forward(encoding: str, weights: dict[str, Tensor], ids: list[int], **changes: Any) -> Tensor:
    """Logits `[N, V]` in float64, a query and a head at a time."""
    size = SIZES | changes
    w = {name: value.double() for name, value in weights.items()}
    dim, heads = size["dim"], size["n_heads"]
    d, kv_heads = dim // heads, size["n_kv_heads"] or heads
    x = w["tok_embeddings.weight"][ids]
    n = len(ids)
    if encoding.startswith("sinusoidal"):
        for i in range(n):
            for c in range(dim):
                angle = i * math.exp(-c * math.log(10_000) / dim)
                x[i, c] += math.cos(angle) if c % 2 else math.sin(angle)
    for layer in range(size["n_layers"]):
        at = f"layers.{layer}."
        y = normed(x, w[f"{at}attention_norm.weight"])
        q, k, v = (y @ w[f"{at}attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        attended = torch.zeros(n, dim, dtype=torch.float64)
        for head in range(heads):
            of_query = slice(head * d, (head + 1) * d)
            group = head * kv_heads // heads
            of_key = slice(group * d, (group + 1) * d)
            for i in range(n):
                query, keys = q[i, of_query], k[: i + 1, of_key]
                if encoding.startswith("rotary"):
                    query = rotated(query, i)
                    keys = torch.stack([rotated(key, j) for j, key in enumerate(keys)])
                content = keys @ query / math.sqrt(d)
                distance = torch.arange(i + 1, dtype=torch.float64) - i
                bias = torch.zeros(i + 1, dtype=torch.float64)
                if encoding.startswith("alibi"):
                    bias = -(2.0 ** (-8 * (head + 1) / heads)) * distance.abs()
                if encoding.startswith("bam"):
                    place = f"{at}attention.prior." if f"{at}attention.prior.theta_beta" in w else "prior."
                    alpha, beta, mu = (w[f"{place}theta_{name}"].flatten()[head] for name in ("alpha", "beta", "mu"))
                    bias = -(((distance - (mu.exp() - (-mu).exp())).abs() + 1e-5) ** beta) * alpha.exp()
                if encoding.startswith("cabam"):
                    part = f"{at}attention.prior.mlp."
                    inner = w[f"{part}0.weight"] @ y[i] + w[f"{part}0.bias"]
                    outer = w[f"{part}2.weight"] @ (inner * torch.sigmoid(inner)) + w[f"{part}2.bias"]
                    a, b, m = outer[3 * head : 3 * head + 3]
                    bias = -(((distance - (m.exp() - (-m).exp())).abs() + 1e-5) ** b) * a.exp()
                if encoding.endswith("ssmax"):
                    scale = w[f"{at}attention.seq_scale"].flatten()[head] * math.log(i + 1)
                    content = scale * content
                    if "bam" in encoding:
                        bias = scale * bias
                attended[i, of_query] = torch.softmax(content + bias, 0) @ v[: i + 1, of_key]
        x = x + attended @ w[f"{at}attention.wo.weight"].T
        y = normed(x, w[f"{at}ffn_norm.weight"])
        gate = y @ w[f"{at}feed_forward.w1.weight"].T
        x = (
            x
            + (gate * torch.sigmoid(gate) * (y @ w[f"{at}feed_forward.w3.weight"].T))
            @ w[f"{at}feed_forward.w2.weight"].T
        )
    return normed(x, w["norm.weight"]) @ w["output.weight"].T


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Neighbouring pairs as complex numbers, turned by angles that the published code has in float32."""
    pairs = torch.view_as_complex(x.reshape(-1, 2))
    frequency = 1.0 / (500_000 ** (torch.arange(0, len(x), 2).float() / len(x)))
    angle = torch.tensor(float(position)) * frequency
    return torch.view_as_real(pairs * torch.complex(angle.cos().double(), angle.sin().double())).flatten()
