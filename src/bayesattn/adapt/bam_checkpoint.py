"""Checkpoints of the BAM authors: `model.pt` and `args.json`, read by the published names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.errors import UserError, cut, first_line, is_number, is_whole, shown
from bayesattn.files import quoted, read_json
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.bam.modeling import BamForCausalLM

WEIGHTS, SETTINGS = "model.pt", "args.json"
# Their names of encodings; each also ends in `_ssmax` for a model with Scalable Softmax.
POSITIONS = {
    "nope": "nope", "sinusoidal": "sinusoidal", "rotary": "rope", "alibi": "alibi", "bam": "bam", "cabam": "cabam"
}  # fmt: skip
# Sizes of a model whose args.json leaves them out.
DEFAULTS = {"dim": 1024, "n_layers": 32, "n_heads": 32, "vocab_size": 32_768, "multiple_of": 1, "max_seq_len": 1024}
SINUSOIDAL_THETA, ROPE_THETA, NORM_EPS = 10_000, 500_000, 1e-5

# Parts of their names and of ours.
_PLACES = {"tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm"}
_PARTS = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_THETAS = {"shape": "theta_beta", "scale": "theta_alpha", "loc": "theta_mu"}  # names of earlier checkpoints
# What our models compute from their configuration, so that a checkpoint need not have it.
_COMPUTED = ("slopes", "grows_with_length", "width")
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class BamCheckpoint:
    """What a checkpoint has, with the names of our models.

    Args:
        config: the network.
        encoding: the authors' name of its encoding, such as `bam_ssmax`.
        weights: as in the file: rows of rotary queries and keys in the authors' order.
    """

    config: BamConfig
    encoding: str
    weights: dict[str, Tensor]


def is_bam_checkpoint(source: str | Path) -> bool:
    """Whether it is a checkpoint of the BAM authors: a folder with an args.json, or a .pt file next to one."""
    path = Path(source)
    return (path / SETTINGS).is_file() or (path.suffix == ".pt" and path.is_file())


def read_checkpoint(source: str | Path) -> BamCheckpoint:
    """A folder with model.pt and args.json, or the .pt file.

    Raises:
        UserError: a file is missing or damaged, would run code, or describes another model.
    """
    path = Path(source)
    file = path if path.suffix == ".pt" else path / WEIGHTS
    content = read_json(file.parent / SETTINGS)
    weights = _read_tensors(file)
    encoding, config = _configuration(content, weights, file.parent / SETTINGS)
    return BamCheckpoint(config, encoding, {_our_name(name): value for name, value in weights.items()})


def build_model(checkpoint: BamCheckpoint) -> BamForCausalLM:
    """The model with the checkpoint's weights, in float32, in evaluation mode.

    Raises:
        UserError: weights are missing, unexpected, or of other shapes.
    """
    model = BamForCausalLM(checkpoint.config)
    state, heads = model.state_dict(), checkpoint.config.num_attention_heads
    names = [name for name in state if not name.endswith(_COMPUTED)]
    missing = [name for name in names if name not in checkpoint.weights and not name.endswith("theta_mu")]
    unexpected = [name for name in checkpoint.weights if name not in state]
    if missing or unexpected:
        raise UserError(f"the checkpoint is not of this model: {_listed(missing, unexpected)}")
    weights = {}
    for name, value in checkpoint.weights.items():
        per_head = name.endswith((".temperature.s", *_THETAS.values()))
        converted = value.reshape(-1) if per_head else value
        if converted.shape != state[name].shape:
            raise UserError(
                f"{name} has shape {list(value.shape)} in the checkpoint and {list(state[name].shape)} by its args.json"
            )
        if checkpoint.config.position == "rope" and name.endswith(("q_proj.weight", "k_proj.weight")):
            converted = split_pairs(converted, heads if "q_proj" in name else checkpoint.config.num_key_value_heads)
        if not converted.isfinite().all():
            raise UserError(f"the weights of the checkpoint are not finite, those of {name} among them")
        weights[name] = converted.float()
    model.load_state_dict(weights, strict=False)
    return model.eval()


def split_pairs(weight: Tensor, heads: int | None) -> Tensor:
    """Rows of each head with the first of every pair before the second.

    The authors rotate neighbouring rows, and transformers rotates row i with row i + D/2.
    """
    pairs = weight.unflatten(0, (heads or 1, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by their names in it without prefixes of wrappers. Nothing of it is executed."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as problem:
        raise UserError(f"{quoted(file)} cannot be read: {problem.strerror or first_line(problem)}") from problem
    except pickle.UnpicklingError as problem:
        raise UserError(f"{quoted(file)} has more than tensors, or is damaged; only tensors are read") from problem
    except Exception as problem:  # a damaged archive gives many types of errors
        raise UserError(f"{quoted(file)} is not a checkpoint of PyTorch: {first_line(problem)}") from problem
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{quoted(file)} has {shown(content)}; names with tensors are needed")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(f"{quoted(file)} has {shown(name)}: {cut(type(value).__name__)}; names with tensors of "
                            "floating-point numbers are needed")  # fmt: skip
    return {name.replace("module.", "").replace("_orig_mod.", ""): value for name, value in content.items()}


def _our_name(name: str) -> str:
    """Our name of a weight, or the name itself if there is none."""
    part, _, kind = name.rpartition(".")
    kind = _THETAS.get(kind, kind)
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
    if part == "prior":
        return f"model.shared_prior.{kind}"
    if layer is None:
        return f"{_PLACES[part]}.{kind}" if part in _PLACES else name
    start = f"model.layers.{layer[1]}."
    if layer[2].startswith("attention.prior.mlp."):
        return f"{start}self_attn.own_prior.network.{layer[2].rpartition('.')[2]}.{kind}"
    if layer[2] == "attention.prior":
        return f"{start}self_attn.own_prior.{kind}"
    if layer[2] == "attention" and kind == "seq_scale":
        return f"{start}self_attn.temperature.s"
    return f"{start}{_PARTS[layer[2]]}.{kind}" if layer[2] in _PARTS else name


def _configuration(content: object, weights: Mapping[str, Tensor], file: Path) -> tuple[str, BamConfig]:
    """The encoding and the configuration that args.json describes."""
    parts = content if isinstance(content, dict) else {}
    arguments, sizes = parts.get("args"), parts.get("model_args")
    if not isinstance(arguments, dict) or not isinstance(sizes, dict):
        raise UserError(f"{quoted(file)} has no args and model_args; that of a run of the BAM authors' code is needed")
    encoding = arguments.get("position_encoding")
    position, _, temperature = str(encoding).partition("_")
    if position not in POSITIONS or temperature not in ("", "ssmax"):
        raise UserError(
            f"position_encoding in {quoted(file)} is {shown(encoding)}; {', '.join(POSITIONS)} can be converted, each "
            "also with _ssmax"
        )
    if position == "bam" and any(".prior.mlp." in name for name in weights):
        position = "cabam"
    size = {name: _whole(sizes, name, default, file) for name, default in DEFAULTS.items()}
    factor = _number(sizes, "ffn_dim_multiplier", 1.0, file)
    hidden, step = int(factor * size["dim"]), size["multiple_of"]
    if position == "sinusoidal" and _number(sizes, "sinusoidal_theta", SINUSOIDAL_THETA, file) != SINUSOIDAL_THETA:
        raise UserError(f"sinusoidal_theta in {quoted(file)} is {shown(sizes['sinusoidal_theta'])}; 10000 is needed")
    kv_heads = sizes.get("n_kv_heads")
    theta = _number(sizes, "rope_theta", ROPE_THETA, file)
    try:
        config = BamConfig(
            vocab_size=size["vocab_size"],
            hidden_size=size["dim"],
            intermediate_size=step * ((hidden + step - 1) // step),
            num_hidden_layers=size["n_layers"],
            num_attention_heads=size["n_heads"],
            num_key_value_heads=None if kv_heads is None else _whole(sizes, "n_kv_heads", 1, file),
            position=POSITIONS[position],
            sinusoids="published",
            share_prior="prior.theta_beta" in weights or "prior.shape" in weights,
            prior_hidden=_whole(sizes, "mlp_width", 32, file),
            learn_centre=sizes.get("train_theta_mu", sizes.get("train_loc")) is True,
            prior_init="zeros",
            scalable_softmax=temperature == "ssmax",
            # Their ALiBi leaves the slopes as they are.
            scale_prior=position in ("bam", "cabam"),
            rope_parameters={"rope_type": "default", "rope_theta": theta} if position == "rotary" else None,
            rms_norm_eps=_number(sizes, "norm_eps", NORM_EPS, file),
            training_length=size["max_seq_len"],
        )
    except ValueError as problem:
        raise UserError(f"{quoted(file)} describes no model: {cut(problem, 200)}") from problem
    return str(encoding), config


def _whole(sizes: Mapping[str, Any], name: str, default: int, file: Path) -> int:
    value = sizes.get(name, default)
    if not is_whole(value, 1, 2**40):
        raise UserError(f"{name} in {quoted(file)} is {shown(value)}; a whole number of at least 1 is needed")
    return int(value)


def _number(sizes: Mapping[str, Any], name: str, default: float, file: Path) -> float:
    value = default if sizes.get(name) is None else sizes[name]
    if not is_number(value) or not 0 < value < 1e30:
        raise UserError(f"{name} in {quoted(file)} is {shown(value)}; a positive number is needed")
    return float(value)


def _listed(missing: list[str], unexpected: list[str]) -> str:
    """Names of weights, the first of each kind, as part of a sentence."""
    parts = []
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"{kind} are {', '.join(cut(name, 60) for name in names[:_NAMES_SHOWN])}{more}")
    return "; ".join(parts)
