"""Which architectures of the installed transformers take a prior: writes docs/architectures.md.

    python tools/architectures.py

Each causal language model is made tiny, with random weights. With a uniform prior on every attention layer it must
have the logits of its own eager attention: for a text, for a padded batch, in steps with a cache, and when it was saved
and loaded.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import bayesattn as ba
from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.parts import num_heads
from bayesattn.errors import UserError, cut, first_line

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
CLOSE = 1e-4
MOST_PARAMETERS = 10_000_000
LENGTH, PADDING = 21, 5
# Tiny values of the settings that configurations have, by name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "n_group", "topk_group"), 1),
    "n_shared_experts": 1,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "mamba_dt_rank", "lru_width"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "ple_dim"), 8),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Those that are set even where the default is None.
ALWAYS = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "pad_token_id",
)
# What some architectures need besides.
NEEDED: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jetmoe": {"num_experts_per_tok": 2},  # times the key/value heads: the query heads
}


# Results, and how the page calls them.
RESULTS = {"passes": "passes", "failed": "fails", "refused": "refused", "untried": "not tried"}
HEAD = """# Architectures that take a prior

All causal language models of transformers {version}. Each is made tiny, with random weights, and
gets a uniform prior on every attention layer. It *passes* if its logits then differ by at most
{close:g} from those of its own eager attention: for a text, for a batch with left padding, for four
steps of `generate()` with a cache, and for the text after the model was saved and loaded.

{passes} pass, {failed} fail. {refused} are refused with the sentence in the table: most of them
compute attention without transformers' AttentionInterface. {untried} were not tried, because no tiny
model could be made from the configuration alone, or it did not run by itself.

`python tools/architectures.py` makes this page."""


class Row(NamedTuple):
    """One line of the table."""

    architecture: str
    result: str
    difference: float | None = None
    sentence: str = ""


def tiny(config_class: Any) -> Any:
    """A configuration of small sizes, with eager attention and without dropout."""
    settings = small(config_class().to_dict()) | NEEDED.get(config_class.model_type, {})
    config = config_class(**settings)
    config._attn_implementation = "eager"
    return config


def small(known: dict[str, Any]) -> dict[str, Any]:
    """Small values for those of the known settings that have a size in their names."""
    settings = {name: value for name, value in SIZES.items() if known.get(name) is not None}
    settings |= {name: SIZES[name] for name in ALWAYS if name in known}
    settings |= {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    if "kv_lora_rank" in known:  # all heads have keys of their own
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if "is_decoder" in known:
        settings["is_decoder"] = True
    if "rotary_dim" in known:
        settings["rotary_dim"] = 4
    parts = {name: value for name, value in known.items() if name.endswith("_config") and isinstance(value, dict)}
    return settings | {name: {**small(value), **fixed(value)} for name, value in parts.items()}


def fixed(known: dict[str, Any]) -> dict[str, Any]:
    """What says which model a part of a configuration is of."""
    return {name: known[name] for name in ("model_type",) if name in known}


def make(config_class: Any, model_class: Any) -> Any:
    """A tiny model whose attention is far from uniform."""
    config = tiny(config_class)
    with torch.device("meta"):
        count = sum(weights.numel() for weights in model_class(tiny(config_class)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its smallest model here has {count:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if not weights.isfinite().all() or name.endswith("sinks"):
                weights.normal_()
            elif weights.dim() > 1 and "embed" not in name and "head" not in name:
                weights.mul_(4)
    return model


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a text, of a padded batch, and of steps with a cache."""
    x = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(x)
    mask[0, :PADDING] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        alone = model(x).logits
        padded = model(x, attention_mask=mask).logits[mask.bool()]
        steps = torch.stack(model.generate(x, attention_mask=mask, **settings).scores)
    return [alone, padded, steps]


def examine(config_class: Any, model_class: Any) -> Row:
    """Compare one architecture with itself."""
    name = model_class.__name__
    try:
        model = make(config_class, model_class)
        wanted = outputs(model)
        if not all(each.isfinite().all() for each in wanted[:2]):
            raise ValueError("its random logits are not finite")
    except Exception as problem:
        return Row(name, "untried", None, first_line(problem))
    try:
        heads = {number: num_heads(layer) for number, layer in attention_layers(model).items()}
        ba.add_prior(model, [ba.Uniform(count) for count in heads.values()])
        got = outputs(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        got.append(outputs(loaded)[0])
    except UserError as problem:
        return Row(name, "refused", None, str(problem))
    except Exception as problem:
        return Row(name, "failed", None, first_line(problem))
    difference = max(
        (a - b).nan_to_num(0, 0, 0).abs().max().item() for a, b in zip(got, [*wanted, wanted[0]], strict=True)
    )
    return Row(name, "passes" if difference <= CLOSE else "failed", difference)


def architectures() -> Iterator[tuple[Any, Any]]:
    """Configuration and model class of every causal language model of transformers."""
    seen = set()
    for config_class in [CONFIG_MAPPING[name] for name in CONFIG_MAPPING]:
        if config_class in MODEL_FOR_CAUSAL_LM_MAPPING and config_class.__module__.startswith("transformers."):
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
            if model_class not in seen:
                seen.add(model_class)
                yield model_class.config_class or config_class, model_class  # of the text model


def page(rows: list[Row]) -> str:
    """The page of the documentation."""
    counts = Counter(row.result for row in rows)
    lines = [
        *HEAD.format(
            version=transformers.__version__, close=CLOSE, **{each: counts[each] for each in RESULTS}
        ).splitlines(),
        "",
        "| architecture | result | largest difference, or why not |",
        "|---|---|---|",
    ]
    for result, words in RESULTS.items():
        for row in sorted(rows):
            if row.result == result:
                said = f"{row.difference:.0e}" if row.difference is not None else row.sentence
                lines.append(f"| {row.architecture} | {words} | {cut(said.partition(';')[0].replace('|', ' '), 140)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    names = sys.argv[1:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    rows = []
    for config_class, model_class in architectures():
        if not names or model_class.__name__ in names:
            rows.append(examine(config_class, model_class))
            print(*rows[-1], flush=True)
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
