"""What the attention layers of a model get while it reads a text.

Shape letters: H query heads, G key/value heads, N tokens, D head size, E value size, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from bayesattn.adapt.attention_layers import attention_layers
from bayesattn.adapt.backend import attend, attend_with
from bayesattn.adapt.classes import ModelWithPrior
from bayesattn.adapt.layout import Layout, make_layout
from bayesattn.adapt.parts import SUPPORTED, prior_of, temperature_of
from bayesattn.attention import visible_counts
from bayesattn.errors import UserError
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.priors import Uniform

READING = "bayesattn_reading"
HAS_PRIOR = "{name} has a prior already; bayesattn.remove_prior(model) takes it away"
# Arguments of attention functions with which the pruning cache does not work.
OWN_LOGITS = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class LayerInput:
    """What the attention of one layer computes with, for one text.

    Args:
        q, k, v: `[H, N, D]`, `[G, N, D]` and `[G, N, E]`; q times the layer's temperature, if it has one.
        scaling: multiplies the logits.
        before, after: `[N, C]`, the hidden states that the layer gets, to which its attention is added, and those that
            it gives.
        projection: the module through which attention goes before it is added.
    """

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    before: Tensor
    after: Tensor
    projection: nn.Module

    @property
    def group(self) -> int:
        """Query heads of each key/value head."""
        return len(self.q) // len(self.k)

    def project(self, change: Tensor, kv_head: int) -> Tensor:
        """`[*, R, M, E]`, what the query heads of a key/value head give, as what the layer adds, `[*, M, C]`.

        It is linear: the bias of the projection is left out.
        """
        size, heads = change.shape[-1], len(self.q)
        joined = change.transpose(-3, -2).flatten(-2)  # [*, M, R·E]
        start, width = kv_head * self.group * size, self.group * size
        padded = nn.functional.pad(joined, (start, heads * size - start - width))
        dtype = self.before.dtype
        zero: Tensor = self.projection(padded.new_zeros(1, heads * size).to(dtype))
        projected: Tensor = self.projection(padded.to(dtype))
        return (projected - zero).float()


# Called for each layer, once its attention is computed.
Visit = Callable[[LayerInput], None]


def check_model(model: object) -> dict[int, nn.Module]:
    """The attention layers of a model that priors can be fitted to, or an error."""
    if isinstance(model, ModelWithPrior):
        raise UserError(HAS_PRIOR.format(name=type(model).__name__))
    return check_readable(model)


def check_readable(model: object) -> dict[int, nn.Module]:
    """The attention layers of a model whose heads can be measured, or an error.

    Priors must be uniform: temperatures are measured with their model, and other priors are windows of a kind already.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}; a causal language model of transformers is needed, before PEFT or "
            "torch.compile wraps it"
        )
    if isinstance(model, DecoderForCausalLM):
        raise UserError(
            f"{type(model).__name__} is a model of bayesattn and has no attention that a prior could be added to; "
            "windows are fitted to other models of transformers"
        )
    layers = attention_layers(model)
    extended = isinstance(model, ModelWithPrior) and model.config.prior.get("extension") is not None
    if extended or not all(isinstance(prior_of(layer), (Uniform, NoneType)) for layer in layers.values()):
        raise UserError(HAS_PRIOR.format(name=type(model).__name__))
    return layers


@torch.no_grad()
def read(model: Any, ids_N: Tensor, visit: Visit | None = None, last: int = 1) -> Tensor:
    """Read a text once, and return the logits of its last positions, `[last, V]`.

    Layers with a sliding window of their own are not visited: their cache is bounded already.
    """
    layers = attention_layers(model)
    numbers = {id(layer): number for number, layer in layers.items()}
    states: dict[int, Tensor] = {}
    computed: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}
    projections: dict[int, nn.Module] = {}

    def begin(number: int) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[number] = (args[0] if args else kwargs["hidden_states"])[0]

        return note

    def project(number: int) -> Callable[..., None]:
        def note(child: nn.Module, _: object) -> None:
            if number in computed:  # the first module after attention
                projections.setdefault(number, child)

        return note

    def end(number: int) -> Callable[..., None]:
        def call(_: nn.Module, __: object, output: Any) -> None:
            before, projection = states.pop(number), projections.pop(number, None)
            if number in computed and visit is not None:
                q, k, v, scaling = computed.pop(number)
                after = (output[0] if isinstance(output, tuple) else output)[0]
                if projection is None:
                    raise UserError(f"{type(layers[number]).__name__} does not project its attention; {SUPPORTED}")
                visit(LayerInput(number, q[0], k[0], v[0], scaling, before, after, projection))

        return call

    def recording(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Layout | None, **given: Any) -> Any:
        number = numbers.get(id(module))
        out, weights = attend(module, q, k, v, mask, **given)
        if number is None or (isinstance(mask, Layout) and mask.window is not None):
            return out, weights
        if extra := [name for name in OWN_LOGITS if given.get(name) is not None]:
            raise UserError(
                f"{type(module).__name__} has {extra[0]}, with which the pruning cache does not work; priors are "
                "fitted to models whose logits are products of queries and keys alone"
            )
        scaling = given.get("scaling") or q.shape[-1] ** -0.5
        if visit is not None:
            temperature = temperature_of(module, None)
            if temperature is not None:
                q = q * temperature(visible_counts(q.shape[2], k.shape[2], device=q.device)).unsqueeze(-1).to(q.dtype)
            computed[number] = q, k, v, scaling
        return out, weights

    hooks: list[Any] = []
    for name, module in model.named_modules():
        number = numbers.get(id(module))
        if number is None:
            continue
        block = model.get_submodule(name.rpartition(".")[0])
        hooks += [block.register_forward_pre_hook(begin(number), with_kwargs=True)]
        hooks += [child.register_forward_pre_hook(project(number)) for child in module.children()]
        hooks += [block.register_forward_hook(end(number))]
    try:
        with _attention(model, recording):
            ids = ids_N[None].to(model.device)
            logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=last).logits[0, -last:]
    finally:
        for hook in hooks:
            hook.remove()
    return logits


@contextmanager
def _attention(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The model with this attention function, in evaluation mode."""
    before, training = model.config._attn_implementation, model.training
    model.eval()
    try:
        if isinstance(model, ModelWithPrior):  # which has one attention implementation
            with attend_with(function):
                yield
            return
        AttentionInterface.register(READING, function)
        AttentionMaskInterface.register(READING, make_layout)
        model.set_attn_implementation(READING)
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)
