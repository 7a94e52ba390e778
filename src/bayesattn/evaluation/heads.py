"""Which heads do what: priors as they are at a length, posteriors as measured on a text, and what must be kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesattn.attention import visible_counts
from bayesattn.compute.architecture import from_config
from bayesattn.data.contexts import Tokens
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader
from bayesattn.models.layers import BamAttention
from bayesattn.models.modeling import BamForCausalLM
from bayesattn.priors import GeneralizedGaussian, Prior
from bayesattn.priors.base import Kind

# Lengths at which heads are described.
LENGTHS = (1024, 16_384, 262_144)
# Tokens that posteriors are measured on.
TOKENS = 1024
FIT_STEPS = 300
BETAS = torch.cat([torch.linspace(-2, -0.1, 20), torch.linspace(0.1, 3, 30)])


@dataclass(frozen=True)
class Head:
    """A head's prior with its temperature: as it is for the last query of so many tokens.

    `span_3` and `span_6` are the distances beyond which 1e-3 and 1e-6 of it lie at the longest length, `effective` the
    tokens it counts on, 1/Σp², at each.
    """

    layer: int
    head: int
    kind: str
    parameters: dict[str, float]
    temperature: list[float]
    span_3: int
    span_6: int
    effective: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Posterior:
    """Mean attention of one layer's heads by distance, `[H, n]`, and the generalized Gaussian nearest to each.

    `beta` and `scale` are of that fit, `divergence` how many nats it is off (Kullback–Leibler); all three are of the
    attention within the n distances alone, as if there were none beyond. `prior` is that of the last query over the
    same distances, with its temperature; None if there is none.
    """

    layer: int
    profile: Tensor
    beta: list[float]
    scale: list[float]
    divergence: list[float]
    prior: Tensor | None = None

    @property
    def beyond(self) -> list[float]:
        """The share of each head's attention at n tokens' distance and further, as on the first tokens of a text."""
        return (1 - self.profile.sum(-1)).clamp(min=0).tolist()

    def to_dict(self) -> dict[str, Any]:
        told = {
            "layer": self.layer,
            "beta": self.beta,
            "scale": self.scale,
            "divergence": self.divergence,
            "profile": _rounded(self.profile),
        }
        return told if self.prior is None else {**told, "prior": _rounded(self.prior)}


def _rounded(rows: Tensor) -> list[list[float]]:
    return [[round(p, 7) for p in row] for row in rows.tolist()]


class Tempered(Prior):
    """A layer's prior with its temperature, as it is for the last query of n tokens.

    Where the temperature is of the content alone, that is the prior itself.
    """

    def __init__(self, attention: BamAttention, n: int) -> None:
        super().__init__(attention.prior.num_heads)
        self.prior = attention.prior
        self.scale = _temperature(attention, n) if attention.config.scale_prior else torch.ones(self.num_heads)

    def forward(self, distance: Tensor) -> Tensor:
        log_density: Tensor = self.prior(distance)
        return log_density * self.scale.to(log_density).reshape(-1, *[1] * distance.dim())

    def human_parameters(self) -> dict[str, Tensor]:
        return self.prior.human_parameters()

    def kinds(self, n: int = 1024) -> list[Kind]:
        """Of the prior itself: a temperature sharpens or blurs what a head is for, it does not change it."""
        return self.prior.kinds(n)


def attentions(reader: Reader) -> list[BamAttention]:
    """Of a BAM model, by layer; none of another."""
    return [layer.self_attn for layer in reader.model.model.layers] if isinstance(reader.model, BamForCausalLM) else []


@torch.no_grad()
def heads(reader: Reader, lengths: Sequence[int] = LENGTHS) -> list[Head]:
    """Every head of a BAM model."""
    found = []
    for layer, attention in enumerate(attentions(reader)):
        kinds = attention.prior.kinds()
        human = {name: value.tolist() for name, value in attention.prior.human_parameters().items()}
        temperatures, effective, spans = [], [], torch.zeros(2, attention.prior.num_heads)
        for n in sorted(lengths):
            prior = Tempered(attention, n)
            temperatures.append(_temperature(attention, n).tolist())
            effective.append(prior.effective_tokens(n).tolist())
            spans = torch.stack([prior.span(mass, n) for mass in (1e-3, 1e-6)])
        for head, kind in enumerate(kinds):
            found.append(
                Head(
                    layer=layer,
                    head=head,
                    kind=kind,
                    parameters={name: float(values[head]) for name, values in human.items()},
                    temperature=[r[head] for r in temperatures],
                    span_3=int(spans[0, head]),
                    span_6=int(spans[1, head]),
                    effective=[values[head] for values in effective],
                )
            )
    return found


def _temperature(attention: BamAttention, n: int) -> Tensor:
    """Of each head for the last of n tokens."""
    if attention.temperature is None:
        return torch.ones(attention.prior.num_heads)
    return attention.temperature(visible_counts(1, n)).reshape(-1).cpu()


@torch.no_grad()
def posteriors(reader: Reader, stream: Tokens, tokens: int = TOKENS) -> list[Posterior]:
    """Mean attention by distance on a text, layer by layer: what heads look at, prior and content together.

    The mean is over the second half of the queries, so that each distance is open to all of them. Keys of heads with
    hindsight are as far away as where they are made, which is that much after their tokens.
    """
    if len(stream) < tokens:
        raise UserError(f"the text has {len(stream):,} tokens; posteriors are measured on {tokens:,}")
    ids = torch.from_numpy(stream[:tokens].astype("int64"))[None].to(reader.model.device)
    weights = _weights(reader, ids)
    found, half = [], tokens // 2
    for layer, posterior in enumerate(weights):
        rows = torch.arange(half, tokens)
        profile = torch.stack([posterior[:, rows, rows - d].mean(-1) for d in range(half)], -1).double()
        found.append(_fitted(layer, profile))
    for layer, attention in enumerate(attentions(reader)):
        prior = Tempered(attention, tokens).log_probability(tokens)[:, :half].exp()
        found[layer] = replace(found[layer], prior=prior)
    return found


def _weights(reader: Reader, ids: Tensor) -> list[Tensor]:
    """Attention `[H, N, N]` of each layer."""
    if not isinstance(reader.model, BamForCausalLM):
        before = reader.model.config._attn_implementation
        reader.model.set_attn_implementation("eager")  # the only one that gives its weights away
        try:
            given = reader.model(input_ids=ids, output_attentions=True).attentions
        finally:
            reader.model.set_attn_implementation(before)
        if not given:
            raise UserError(f"{reader.name} does not tell its attention weights")
        return [layer[0].float().cpu() for layer in given]
    weights: list[Tensor] = []

    def look(module: Any, args: tuple[Any, ...]) -> None:
        weights.append(module.posterior(*args[:4])[0].float().cpu())

    hooks = [attention.register_forward_pre_hook(look) for attention in attentions(reader)]
    try:
        reader.model.model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return weights


def _fitted(layer: int, profile: Tensor) -> Posterior:
    """The generalized Gaussian with the least divergence from each head's profile."""
    target = profile / profile.sum(-1, keepdim=True)
    n = profile.shape[1]
    distance = torch.arange(n, dtype=torch.float64)
    # The best of a grid, then downhill from there.
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
        profile=profile,
        beta=human["beta"].tolist(),
        scale=human["scale"].tolist(),
        divergence=divergence.tolist(),
    )


@torch.no_grad()
def cache_bytes(reader: Reader, stream: Tokens, lengths: Sequence[int], tokens: int = 8192) -> list[dict[str, int]]:
    """Bytes of keys and values at each length: all of them, and what the cache that forgets keeps.

    What it keeps is told by its spans after reading the first `tokens` of the text.
    """
    architecture = from_config(reader.model.config, reader.name)
    element = next(reader.model.parameters()).element_size()
    rows = [{"length": n, "full": n * architecture.kv_elements * element} for n in lengths]
    if not isinstance(reader.model, BamForCausalLM):
        return rows
    cache = reader.model.make_cache()
    ids = torch.from_numpy(stream[:tokens].astype("int64"))[None].to(reader.model.device)
    reader.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    per_head = 2 * architecture.head_size * element
    for row in rows:
        n = row["length"]
        kept = sum(n if span is None else min(n, span) for layer in cache.caches for span in layer.spans)
        row["kept"] = kept * per_head
    return rows
