"""Time a decoding step of one layer with the pruning cache, and tokens/s of generate(), against their peers.

python tools/measure_decoding.py                # steps at 256, 1,024, 4,096 and 65,536 keys
python tools/measure_decoding.py --generate     # bam-small and a 12-layer model, against Llamas of their shape
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bayesattn as ba
from bayesattn.benchmarks.long import HEADS, SIZE, mixes

STEPS, ROUNDS = 16, 15


def step(mix: str, n: int) -> str:
    """Microseconds of append + SDPA in a preallocated cache and of `LayerCache.attend`, from n keys on."""
    torch.manual_seed(0)
    total = n + STEPS * (ROUNDS + 1)
    q, k, v = torch.randn(3, 1, HEADS, total, SIZE)
    cache = ba.LayerCache(mixes()[mix], query_scale=ba.ScalableSoftmax(HEADS, 0.3))
    cache.reserve(total)
    full_k, full_v = torch.empty_like(k), torch.empty_like(v)
    full_k[:, :, :n], full_v[:, :, :n] = k[:, :, :n], v[:, :, :n]
    for start in range(0, n, 4096):
        stop = min(n, start + 4096)
        cache.attend(q[:, :, max(start, stop - 256) : stop], k[:, :, start:stop], v[:, :, start:stop])
    tokens = [[x[:, :, i : i + 1].clone() for x in (q, k, v)] for i in range(n, total)]

    def append_and_attend(position: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        held = slice(0, position + 1)
        full_k[:, :, position : position + 1], full_v[:, :, position : position + 1] = k, v
        scaled_dot_product_attention(q, full_k[:, :, held], full_v[:, :, held])

    times: list[tuple[float, float]] = []
    for first in range(0, total - n, STEPS):
        positions = range(first, first + STEPS)
        begin = time.perf_counter()
        for i in positions:
            append_and_attend(n + i, *tokens[i])
        middle = time.perf_counter()
        for i in positions:
            cache.attend(*tokens[i])
        times.append(((middle - begin) / STEPS, (time.perf_counter() - middle) / STEPS))
    full, ours = (1e6 * statistics.median(each) for each in zip(*times[1:], strict=True))
    return f"{mix:15s} {n:6,d} keys   append + SDPA {full:8.1f} µs   cache {ours:8.1f} µs   ratio {ours / full:.2f}"


def generate() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = ba.BamConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=1024
    )
    models = {"bam-small": ba.load_model("bam-small"), "12 layers": ba.BamForCausalLM(config)}
    for name, model in models.items():
        shape = {
            field: getattr(model.config, field)
            for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        }
        heads = model.config.num_attention_heads
        while shape["hidden_size"] % heads:  # 6 for the 5 heads of bam-small: Llama's divide its size
            heads += 1
        llama = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=heads, max_position_embeddings=8192))
        for n in (256, 1024):
            prompt = torch.randint(1, shape["vocab_size"], (1, n))
            row = {
                "ours": _per_second(model, prompt),
                "dynamic": _per_second(llama, prompt, cache_implementation="dynamic"),
                "static": _per_second(llama, prompt, cache_implementation="static", disable_compile=True),
            }
            print(f"{name:10s} {n:5,d} tokens   " + "   ".join(f"{key} {value:.0f}/s" for key, value in row.items()))


def _per_second(model: torch.nn.Module, prompt: Tensor, new: int = 48, **settings: object) -> float:
    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        model.eval().generate(  # type: ignore[operator]
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings
        )
        return time.perf_counter() - begin

    return statistics.median(new / (seconds(new + 1) - seconds(1)) for _ in range(3))


if __name__ == "__main__":
    with torch.no_grad():
        if "--generate" in sys.argv:
            generate()
        else:
            for keys in (256, 1024, 4096, 65536):
                for kind in mixes():
                    print(step(kind, keys), flush=True)
