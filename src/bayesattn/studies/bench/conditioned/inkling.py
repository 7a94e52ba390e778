"""The attention of Inkling, of transformers, and the same layer with our attention in it.

`python -m bayesattn.studies.bench.conditioned.inkling LAYER METHOD TOKENS SEED` prints the peak memory of a forward
pass; LAYER and METHOD are indices in `LAYERS` and `METHODS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import InklingTextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.inkling.modeling_inkling import InklingAttention

import bayesattn as ba
from bayesattn.compute.device import device_memory
from bayesattn.studies.bench.attention.measure import HEADS, SIZE
from bayesattn.studies.bench.conditioned.run import Peer
from bayesattn.studies.bench.inputs import LARGEST_ERROR, SHARE_OF_MEMORY
from bayesattn.studies.bench.measure import bytes_needed, peak_bytes, peak_bytes_of, seconds_in_turn

LAYERS = ("full", "sliding")
METHODS = ("transformers", "bayesattn")
# Matrices of tokens × tokens for each head that Inkling's own attention holds at once, rounded up.
MATRICES = 5
# The position from which Inkling's temperature grows; the released model sets one too.
LOG_SCALING_FLOOR = 1024


def make_layer(kind: str, seed: int, **sizes: Any) -> InklingAttention:
    """A full or sliding layer with random weights; `sizes` replace those of the study."""
    torch.manual_seed(seed)
    heads = sizes.pop("heads", HEADS)
    key_heads = sizes.pop("key_heads", heads)
    size = sizes.pop("head_size", SIZE)
    config = InklingTextConfig(
        hidden_size=heads * size,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        swa_num_attention_heads=heads,
        swa_num_key_value_heads=key_heads,
        swa_head_dim=size,
        layer_types=["hybrid", "hybrid_sliding"],
        **{"log_scaling_n_floor": LOG_SCALING_FLOOR, **sizes},
    )
    config._attn_implementation = "sdpa"  # the default of the model
    layer = InklingAttention(config, LAYERS.index(kind))
    torch.nn.init.normal_(layer.rel_logits_proj.proj)
    return layer.eval()


def with_transformers(layer: InklingAttention, hidden: Tensor) -> Tensor:
    """The layer as it is, with the mask that its model makes."""
    make_mask = create_sliding_window_causal_mask if layer.is_sliding else create_causal_mask
    mask = make_mask(
        config=layer.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None,
        position_ids=torch.arange(hidden.shape[1])[None],
    )  # fmt: skip
    out: Tensor = layer(hidden, mask)[0]
    return out


def with_ours(layer: InklingAttention, hidden: Tensor) -> Tensor:
    """The same function of the same weights: the relative logits are a `ProfileBank`, the temperature a query scale."""

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

    q = layer.q_norm(by_head(layer.q_proj(hidden)))
    k = layer.k_norm(by_head(layer.k_sconv(layer.k_proj(hidden))))
    v = by_head(layer.v_sconv(layer.v_proj(hidden)))
    mixture = layer.r_proj(hidden).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    prior = ba.GivenPrior(ba.ProfileBank, layer.num_heads, mixture, (layer.rel_logits_proj.proj.unsqueeze(0),))
    if layer.sliding_window is not None:
        prior = prior * ba.Window(layer.num_heads, layer.sliding_window)
    attended = ba.bayesian_attention(q, k, v, prior, query_scale=temperature(layer), softmax_scale=layer.scaling)
    out: Tensor = layer.o_proj(attended.transpose(1, 2).flatten(2))
    return out


def temperature(layer: InklingAttention) -> ba.InklingScaling | None:
    """The log-length scaling of full layers."""
    floor, strength = layer.config.log_scaling_n_floor, layer.config.log_scaling_alpha
    return None if layer.is_sliding or floor is None else ba.InklingScaling(layer.num_heads, floor, strength)


def measure(tokens: int, *, seed: int = 0, memory: bool = True) -> list[Peer]:
    """Both kinds of layers, a forward pass: theirs and ours in turn, memory in processes of their own."""
    return [_measure(kind, tokens, seed, memory) for kind in LAYERS]


def _measure(kind: str, tokens: int, seed: int, memory: bool) -> Peer:
    room = device_memory() * SHARE_OF_MEMORY
    needed = bytes_needed(
        MATRICES * HEADS * tokens**2 * 4,
        room,
        tokens,
        (lambda fewer: peak_memory(kind, METHODS[0], fewer, seed)) if memory else None,
    )
    if needed > room:
        return Peer(kind, tokens, None, None, None, None, None, f"needs {needed / 1e9:.0f} GB")
    layer, hidden = make_layer(kind, seed), torch.randn(1, tokens, HEADS * SIZE)
    with torch.no_grad():
        expected = with_transformers(layer, hidden)
        error = float((with_ours(layer, hidden) - expected).norm() / expected.norm())
        if not error <= LARGEST_ERROR:
            return Peer(kind, tokens, None, None, None, None, error, f"wrong by {error:.1e}, not timed")
        seconds = seconds_in_turn(
            {name: lambda run=run: run(layer, hidden) for name, run in _RUN.items()}  # type: ignore[misc]
        )
    theirs, ours = (peak_memory(kind, name, tokens, seed) if memory else None for name in METHODS)
    return Peer(kind, tokens, seconds["bayesattn"], seconds["transformers"], ours, theirs, error)


_RUN: dict[str, Callable[[InklingAttention, Tensor], Tensor]] = dict(
    zip(METHODS, (with_transformers, with_ours), strict=True)
)


def peak_memory(kind: str, method: str, tokens: int, seed: int = 0) -> int:
    """Bytes that a forward pass needs above its inputs and weights, measured in a process of its own."""
    arguments = (LAYERS.index(kind), METHODS.index(method), tokens, seed)
    return peak_bytes_of("bayesattn.studies.bench.conditioned.inkling", *map(str, arguments))


def _print_peak(kind: int, method: int, tokens: int, seed: int) -> None:
    layer, run = make_layer(LAYERS[kind], seed), _RUN[METHODS[method]]
    hidden = torch.randn(1, tokens, HEADS * SIZE)
    with torch.no_grad():
        run(layer, hidden[:, :64])  # load everything that a first call loads
        print(json.dumps(peak_bytes(lambda: run(layer, hidden))))


if __name__ == "__main__":
    _print_peak(*(int(argument) for argument in sys.argv[1:]))
