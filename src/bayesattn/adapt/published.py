"""The forward pass of the BAM authors' models by its formulas: dense, slow, and only for comparing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from bayesattn.adapt.bam_checkpoint import BamCheckpoint
from bayesattn.models.bam.modeling import published_sinusoids
from bayesattn.priors import alibi_slopes

PRIOR_EPSILON = 1e-5


@torch.no_grad()
def published_logits(checkpoint: BamCheckpoint, ids: Tensor) -> Tensor:
    """Logits `[B, N, V]` in float64 of tokens `[B, N]`.

    With RMSNorm, x + attention(norm(x)) and x + W₂(silu(W₁ y) ⊙ W₃ y), y = norm(x), for each layer. The attention of a
    head has the logits s·log n_i · (q_i·k_j / √D + b_ij) for `bam_ssmax`, where n_i is the number of visible keys; its
    bias b is −e^θ_α (|j − i − μ| + 1e-5)^θ_β with μ = 2 sinh θ_μ. With `cabam` the three θ are of the query, of its
    normed input: W₂ silu(W₁ y_i + c₁) + c₂. With ALiBi, s·log n_i multiplies the content alone.
    """
    weights = checkpoint.weights  # one layer at a time is in float64
    config, n = checkpoint.config, ids.shape[1]
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    position = torch.arange(n)
    x = weights["model.embed_tokens.weight"][ids].double()
    if config.position == "sinusoidal":
        x = x + published_sinusoids(position, config.hidden_size, torch.float64)
    for number in range(config.num_hidden_layers):
        place = f"model.layers.{number}."
        layer = {
            name.removeprefix(place): value.double()
            for name, value in weights.items()
            if name.startswith((place, "model.shared_prior."))
        }
        y = _norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2) for part in "qkv"
        )
        if config.position == "rope":
            assert config.rope_parameters is not None
            q, k = (_rotate_pairs(each, position, config.rope_parameters["rope_theta"]) for each in (q, k))
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
        logits = q @ k.mT * size**-0.5
        bias = _bias(checkpoint, layer, y, position)
        scale = torch.ones(())
        if config.scalable_softmax:
            growth = (position + 1.0).double().log()[:, None]
            scale = growth * layer["self_attn.temperature.s"].reshape(-1, 1, 1)
        logits = scale * (logits + bias) if config.scale_prior else scale * logits + bias
        hidden = position[None, :] > position[:, None]
        attended = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + attended.transpose(1, 2).flatten(2) @ layer["self_attn.o_proj.weight"].T
        y = _norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"].double(), config.rms_norm_eps) @ weights["lm_head.weight"].double().T


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _bias(checkpoint: BamCheckpoint, layer: dict[str, Tensor], y: Tensor, position: Tensor) -> Tensor:
    """What is added to the content, `[H, N, N]` or `[B, H, N, N]`."""
    config = checkpoint.config
    ahead = (position[None, :] - position[:, None]).double()
    if config.position == "alibi":
        return -alibi_slopes(config.num_attention_heads).double()[:, None, None] * ahead.abs()
    if config.position == "cabam":
        first, second = (f"self_attn.own_prior.network.{number}." for number in (0, 2))
        hidden = silu(y @ layer[f"{first}weight"].T + layer[f"{first}bias"])
        of_queries = (
            (hidden @ layer[f"{second}weight"].T + layer[f"{second}bias"]).unflatten(-1, (-1, 3)).transpose(1, 2)
        )
        return _gaussian(ahead, *of_queries.unsqueeze(-2).unbind(-1))
    if config.position != "bam":
        return torch.zeros(())
    own, shared = "self_attn.own_prior.", "model.shared_prior."
    thetas = [layer.get(f"{own}theta_{name}", layer.get(f"{shared}theta_{name}")) for name in ("alpha", "beta", "mu")]
    return _gaussian(ahead, *(torch.zeros(1, 1, 1) if each is None else each.reshape(-1, 1, 1) for each in thetas))


def _gaussian(ahead: Tensor, alpha: Tensor, beta: Tensor, mu: Tensor) -> Tensor:
    return -alpha.exp() * ((ahead - 2 * mu.sinh()).abs() + PRIOR_EPSILON) ** beta


def _rotate_pairs(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Neighbouring pairs of channels, rotated by the position; x `[B, H, N, D]`. Angles are in float32, as theirs."""
    frequency = 1.0 / theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angle = position.float()[:, None] * frequency
    cosine, sine = angle.cos().double(), angle.sin().double()
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)
