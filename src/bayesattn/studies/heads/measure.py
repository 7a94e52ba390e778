"""What each head does: its prior at a length, its attention on a text, and the keys that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention import posterior as attention_posterior
from bayesattn.attention import visible_counts
from bayesattn.compute.architecture import from_config
from bayesattn.data.contexts import Tokens
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.models.attention import DecoderAttention, QueryPrior, attend_with
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.priors import GeneralizedGaussian, Prior, Sinks
from bayesattn.priors.base import Kind
from bayesattn.studies.heads.adapted import AddedPrior, added_priors, is_adapted, weights_with_priors
from bayesattn.studies.heads.run import LENGTHS, CacheSize, Head, Posterior

# Tokens that posteriors are measured on.
TOKENS = 1024
FIT_STEPS = 300
BETAS = torch.cat([torch.linspace(-2, -0.1, 20), torch.linspace(0.1, 3, 30)])


class ScaledPrior(Prior):
    """A layer's prior times its temperatures, for the last query of n tokens.

    It is the prior itself where temperatures scale the content alone.
    """

    def __init__(self, attention: DecoderAttention | AddedPrior, n: int) -> None:
        super().__init__(attention.prior.num_heads)
        assert isinstance(attention.distance_prior, Prior)
        self.prior = attention.distance_prior
        self.scale = _temperature(attention, n) if attention.scale_prior else torch.ones(self.num_heads)

    def forward(self, distance: Tensor) -> Tensor:
        log_density: Tensor = self.prior(distance)
        return log_density * self.scale.to(log_density).reshape(-1, *[1] * distance.dim())

    def human_parameters(self) -> dict[str, Tensor]:
        return self.prior.human_parameters()

    def kinds(self, n: int = 1024) -> list[Kind]:
        """The kinds of the prior itself: a temperature makes a head sharper or softer, and does not change its kind."""
        return self.prior.kinds(n)


def attentions(model: object) -> list[DecoderAttention]:
    """The attention of each layer of our models; none for other models."""
    return [layer.self_attn for layer in model.model.layers] if isinstance(model, DecoderForCausalLM) else []


def static_priors(model: object) -> dict[int, DecoderAttention | AddedPrior]:
    """Those whose prior is the same for every query, so that it can be summarised, by layer; sinks are left aside."""
    layers: dict[int, Any] = added_priors(model) if is_adapted(model) else dict(enumerate(attentions(model)))
    return {number: layer for number, layer in layers.items() if isinstance(layer.distance_prior, Prior)}


@torch.no_grad()
def heads(reader: Reader, lengths: Sequence[int] = LENGTHS) -> list[Head]:
    """Every head of the layers of one of our models."""
    rows = []
    for layer, attention in static_priors(reader.model).items():
        prior = attention.distance_prior
        assert isinstance(prior, Prior)
        kinds = prior.kinds()
        human = {name: value.tolist() for name, value in prior.human_parameters().items()}
        temperatures = [_temperature(attention, n).tolist() for n in sorted(lengths)]
        effective = [ScaledPrior(attention, n).effective_tokens(n).tolist() for n in sorted(lengths)]
        longest = max(lengths)
        spans = [ScaledPrior(attention, longest).span(mass, longest).tolist() for mass in (1e-3, 1e-6)]
        for head, kind in enumerate(kinds):
            rows.append(
                Head(
                    layer=layer,
                    head=head,
                    kind=kind,
                    parameters={name: float(values[head]) for name, values in human.items()},
                    temperature=[r[head] for r in temperatures],
                    span_3=spans[0][head],
                    span_6=spans[1][head],
                    effective=[values[head] for values in effective],
                )
            )
    return rows


def _temperature(attention: DecoderAttention | AddedPrior, n: int) -> Tensor:
    """The temperature of each head for the last of n tokens."""
    if attention.temperature is None:
        return torch.ones(attention.prior.num_heads)
    return attention.temperature(visible_counts(1, n)).reshape(-1).cpu()


@torch.no_grad()
def posteriors(reader: Reader, stream: Tokens, tokens: int = TOKENS) -> list[Posterior]:
    """Mean attention by distance on a text, layer by layer.

    The mean is over the second half of the queries, so that each distance is open to all of them. A delayed key is as
    far away as the position where it is made, which is `key_delay` after its token.
    """
    if len(stream) < tokens:
        raise UserError(f"the text has {len(stream):,} tokens; posteriors are measured on {tokens:,}")
    ids = torch.from_numpy(stream[:tokens].astype("int64"))[None].to(reader.model.device)
    with reader.checked_model():
        weights = _weights(reader, ids)
    layers, half = [], tokens // 2
    for layer, posterior in enumerate(weights):
        rows = torch.arange(half, tokens)
        profile = torch.stack([posterior[:, rows, rows - d].mean(-1) for d in range(half)], -1).double()
        layers.append(_fit(layer, profile))
    for layer, attention in static_priors(reader.model).items():
        probability = ScaledPrior(attention, tokens).log_probability(tokens)[:, :half].exp()
        layers[layer] = replace(layers[layer], prior=probability.tolist())
    return layers


def _weights(reader: Reader, ids: Tensor) -> list[Tensor]:
    """Attention `[H, N, N]` of each layer."""
    if is_adapted(reader.model):
        return weights_with_priors(reader.model, ids)
    if not isinstance(reader.model, DecoderForCausalLM):
        before = reader.model.config._attn_implementation
        reader.model.set_attn_implementation("eager")  # the only one that returns its weights
        try:
            given = reader.model(input_ids=ids, output_attentions=True).attentions
        finally:
            reader.model.set_attn_implementation(before)
        if not given:
            raise UserError(f"{reader.name} does not return its attention weights")
        return [layer[0].float().cpu() for layer in given]
    layers, weights = attentions(reader.model), []

    def record(
        attention: DecoderAttention, q: Tensor, k: Tensor, v: Tensor, prior: QueryPrior, document_ids: Tensor | None
    ) -> Tensor:
        if attention in layers:
            posterior = attention_posterior(
                q,
                k,
                prior,
                query_scale=attention.temperature,
                scale_prior=attention.scale_prior,
                softmax_scale=attention.softmax_scale,
            )
            weights.append(posterior[0].float().cpu())
        return DecoderAttention.attend(attention, q, k, v, prior, document_ids)

    with attend_with(reader.model, record):
        reader.model.model(input_ids=ids, use_cache=False)
    return weights


def _fit(layer: int, profile: Tensor) -> Posterior:
    """Fit the generalized Gaussian with the least divergence from each head's profile."""
    target = profile / profile.sum(-1, keepdim=True)
    n = profile.shape[1]
    distance = torch.arange(n, dtype=torch.float64)
    # A grid search, then gradient descent.
    beta, scale = (x.flatten() for x in torch.meshgrid(BETAS, torch.logspace(-1, math.log10(n), 40), indexing="ij"))
    candidates = GeneralizedGaussian.from_shape(beta.tolist(), scale.tolist(), epsilon=1.0)
    best = (target @ candidates(distance).log_softmax(-1).T).argmax(-1)
    with torch.enable_grad():
        prior = GeneralizedGaussian.from_shape(beta[best].tolist(), scale[best].tolist(), epsilon=1.0)
        optimizer = torch.optim.Adam(prior.parameters(), lr=0.01)
        for _ in range(FIT_STEPS):
            optimizer.zero_grad()
            (-(target * prior(distance).log_softmax(-1)).sum()).backward()
            optimizer.step()
    fit = prior.log_probability(n)
    divergence = (target * (target.clamp(min=1e-30).log() - fit)).sum(-1)
    human = prior.human_parameters()
    return Posterior(
        layer=layer,
        profile=profile.tolist(),
        beta=human["beta"].tolist(),
        scale=human["scale"].tolist(),
        divergence=divergence.tolist(),
    )


@torch.no_grad()
def cache_sizes(reader: Reader, stream: Tokens, lengths: Sequence[int], tokens: int = 8192) -> list[CacheSize]:
    """Bytes of keys and values at each length, of a full cache and of the pruning cache.

    The pruning cache counts with the spans that it has after the first `tokens` of the text.
    """
    architecture = from_config(reader.model.config, reader.name)
    element = next(reader.model.parameters()).element_size()
    rows = [CacheSize(n, n * architecture.kv_elements * element) for n in lengths]
    if not hasattr(reader.model, "make_cache"):
        return rows
    cache = reader.model.make_cache()
    if is_adapted(reader.model):  # windows do not depend on the text
        tokens = min(tokens, TOKENS)
    ids = torch.from_numpy(stream[:tokens].astype("int64"))[None].to(reader.model.device)
    with reader.checked_model() as model:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    per_head = 2 * architecture.head_size * element
    spans = [
        None if span is None else span + (layer.prior.count if isinstance(layer.prior, Sinks) else 0)
        for layer in cache.caches
        for span in layer.spans
    ]
    return [
        replace(row, kept=per_head * sum(row.length if span is None else min(row.length, span) for span in spans))
        for row in rows
    ]
