"""What an extended attention layer computes: near keys with their rotary positions, far keys with none or few.

Shape letters: B batch, H query heads, G key/value heads, M queries, N keys, D head size, E value size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesattn.adapt.layout import Layout
from bayesattn.adapt.parts import ROTARY, hooks_of
from bayesattn.adapt.rotation import Rotation, at_position_zero, rotations
from bayesattn.adapt.structure import FAMILY
from bayesattn.attention import InklingScaling, Llama4Scaling, MistralScaling, visible_counts
from bayesattn.attention.near_far import near_far_attention, near_keys
from bayesattn.attention.scaling import FixedScaling
from bayesattn.errors import UserError, is_whole, shown

if TYPE_CHECKING:  # importing it is what registers the backend, which needs this module
    from transformers import PreTrainedModel

LAWS: dict[str, type[FixedScaling]] = {law.__name__: law for law in (InklingScaling, Llama4Scaling, MistralScaling)}
# A key/value head: the number of its layer, and its own.
Head = tuple[int, int]
# First tokens that near heads keep.
SINKS = 4
# The attribute of an attention module.
EXTENSION = "extension"
DROPPED = (
    "the cache of a layer with a sliding window drops the first tokens, from which {name} of extend counts; generate "
    "with use_cache=False"
)


@dataclass(frozen=True)
class ExtensionSettings:
    """The structure of an extension, as values of JSON in a configuration.

    Args:
        window: distances below it are rotated as they are.
        length: tokens that the model was trained to.
        temperature: a law of `attention.scaling` by its name, with its strength and length; None for none.
        group: far keys are rotated to positions in steps of so many tokens; None for the distance `window` for all.
        sinks: the far part of near heads sees only so many of the first keys; None if there are no near heads.
        layers: numbers of the extended layers; the others have no rotary positions.
        near: near heads, by layer and key/value head; None for all if there are sinks.
    """

    window: int
    length: int
    layers: tuple[int, ...]
    temperature: dict[str, Any] | None = None
    group: int | None = None
    sinks: int | None = None
    near: tuple[Head, ...] | None = None

    @classmethod
    def of(cls, given: object) -> ExtensionSettings:
        """From a configuration, or an error."""
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not {"window", "length", "layers"} <= given.keys() <= known:
            raise UserError(f"extension in the configuration is {shown(given)}; what extend writes there is needed")
        near, layers = given.get("near"), given["layers"]
        for name, value in (("near", near), ("layers", layers)):
            if not isinstance(value, (list, tuple)) and (name == "layers" or value is not None):
                raise UserError(f"{name} of the extension in the configuration is {shown(value)}; a list is needed")
        if wrong := [number for number in layers if not is_whole(number, 0, 2**20)]:
            raise UserError(f"layers of the extension in the configuration have {shown(wrong[0])}; numbers are needed")
        if near is not None:
            near = tuple(tuple(head) if isinstance(head, list) else head for head in near)
        made = cls(**{**given, "layers": tuple(layers), "near": near})
        made.check()
        return made

    def check(self) -> None:
        """Raise an error for values that are not allowed."""
        if not is_whole(self.length, 2, 2**40):
            raise UserError(f"the training length is {shown(self.length)}; a whole number of tokens is needed")
        if not is_whole(self.window, 1, self.length - 1):
            raise UserError(
                f"window is {shown(self.window)}; the model was trained to {self.length:,} tokens, so a whole number "
                f"from 1 to {self.length - 1:,} is needed"
            )
        for name, value, least in (("group", self.group, 2), ("sinks", self.sinks, 1)):
            if value is not None and not is_whole(value, least, self.length):
                raise UserError(
                    f"{name} is {shown(value)}; a whole number of tokens from {least} to {self.length:,} is needed"
                )
        if self.group is not None and self.sinks is not None:
            raise UserError("group and sinks are two ways to treat far keys; one of them is allowed")
        if self.near is not None:
            if self.sinks is None:
                raise UserError("near heads see the first tokens, so sinks must say how many")
            for head in self.near:
                if not isinstance(head, tuple) or len(head) != 2 or not all(is_whole(each, 0, 2**20) for each in head):
                    raise UserError(
                        f"near has {shown(head)}; pairs of a layer's number and one of its key/value heads are needed"
                    )

    def near_heads(self, layer: int, num_kv_heads: int) -> list[int]:
        """Key/value heads of a layer that look only near."""
        if self.sinks is None:
            return []
        if self.near is None:
            return list(range(num_kv_heads))
        heads = sorted({head for number, head in self.near if number == layer})
        if heads and heads[-1] >= num_kv_heads:
            raise UserError(
                f"near has key/value head {heads[-1]} of layer {layer}, which has {num_kv_heads}, counted from 0"
            )
        return heads

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        content = {**asdict(self), "layers": list(self.layers)}
        near = content.pop("near")
        return content if near is None else {**content, "near": [list(head) for head in near]}


class Extension:
    """How one attention layer reads beyond the training length of its model.

    With R(p) the model's rotation to position p, query i and key j of distance d = i − j have the content

        R(i) q · R(j) k                                               for d < window
        R(window) q · k                                               from there on
        R(⌊i / group⌋ + window − ⌊window / group⌋) q · R(⌊j / group⌋) k   with a group

    times the temperature of query i, where a group counts i and j from the start of their document. Near heads see
    only the first keys of a document from the distance `window` on. A temperature is that of the keys that the query
    sees in its head. Keys come and are cached without rotation.
    """

    def __init__(self, settings: ExtensionSettings, rotation: Rotation, number: int = 0) -> None:
        self.settings, self.rotation, self.number = settings, rotation, number
        self.law = _make_law(settings.temperature)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_prior: Tensor | None, layout: Layout, **given: Any) -> Tensor:
        """The output `[B, H, M, E]`, for queries and keys that are not rotated.

        The keyword arguments are those of `attend_to`.
        """
        near = self.settings.near_heads(self.number, k.shape[1])
        whole = [head for head in range(k.shape[1]) if head not in near]
        if not near or not whole:
            return self.attend_to(q, k, v, log_prior, layout, looks_near=bool(near), **given)
        group, outs = q.shape[1] // k.shape[1], []
        for heads in (near, whole):
            of_queries = queries_of(heads, group)
            table = None if log_prior is None else log_prior[of_queries]
            out = self.attend_to(
                heads_of(q, of_queries), heads_of(k, heads), heads_of(v, heads), table, layout,
                looks_near=heads is near, query_heads=of_queries, **given,
            )  # fmt: skip
            outs.append(out)
        return in_order(outs, [*queries_of(near, group), *queries_of(whole, group)])

    def attend_to(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_prior: Tensor | None,
        layout: Layout,
        *,
        looks_near: bool,
        query_heads: Sequence[int] | None = None,
        temperature: Callable[[Tensor], Tensor] | None = None,
        scale_prior: bool = True,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """The same for heads that all look only near, or all have a far part.

        Args:
            query_heads: which of the layer's query heads these are; None for all.
            temperature: of the layer itself, for all of its query heads.
        """
        queries, keys = q.shape[2], k.shape[2]
        window, sinks = min(self.settings.window, max(1, keys)), self.settings.sinks if looks_near else None
        needed = near_keys(queries, keys, window)
        near = (
            self.rotation.at_range(q, needed - queries),
            self.rotation.at_range(k[:, :, keys - needed :], 0),
        )
        far = near if keys <= window else self._far(q, k, window, layout, sinks)
        scale = self._query_scale(q, keys, layout, temperature, sinks, query_heads)
        return near_far_attention(
            near, far, v, window, log_prior, far_keys=sinks, query_scale=scale, scale_prior=scale_prior,
            softmax_scale=softmax_scale, document_ids=layout.document_ids,
        )  # fmt: skip

    def _far(self, q: Tensor, k: Tensor, window: int, layout: Layout, sinks: int | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of the far part, all queries and the keys that some query sees there."""
        queries, keys, group = q.shape[2], k.shape[2], self.settings.group
        dropped = layout.window is not None and layout.window > window and queries < keys
        if dropped and (group is not None or sinks is not None):
            raise UserError(DROPPED.format(name="sinks" if group is None else "group"))
        k = k[:, :, : keys - window]
        if group is not None:
            # Places in a document, `[N]` or `[B, N]`, so that padding and packing change nothing.
            places = visible_counts(keys, keys, document_ids=layout.document_ids, device=q.device) - 1
            steps = places.long().clamp(min=0) // group
            of_queries = steps[..., keys - queries :] + window - window // group
            return self.rotation(q, of_queries), self.rotation(k, steps[..., : keys - window])
        one = torch.zeros(1, dtype=torch.long, device=q.device)
        return self.rotation(q, one + window), k if self.rotation.scaling() == 1 else self.rotation(k, one)

    def _query_scale(
        self,
        q: Tensor,
        keys: int,
        layout: Layout,
        temperature: Callable[[Tensor], Tensor] | None,
        sinks: int | None,
        query_heads: Sequence[int] | None,
    ) -> Tensor | None:
        """r, `[H, M]` or `[B, H, M]`: the layer's own temperature times that of the extension."""
        seen = keys if sinks is None else min(keys, self.settings.window + sinks)
        law = self.law if self.law is not None and seen >= self.law.length else None  # it is 1 for less
        if law is None and temperature is None:
            return None
        counts = visible_counts(q.shape[2], keys, document_ids=layout.document_ids, device=q.device)
        counts = counts.double() if q.dtype == torch.float64 else counts
        if sinks is not None:
            counts = counts.clamp(max=self.settings.window + sinks)
        scale = None if temperature is None else temperature(counts)
        if scale is not None and query_heads is not None:
            scale = scale[..., query_heads, :]
        if law is None:
            return scale
        grown = law(counts if layout.window is None else counts.clamp(max=layout.window))
        if scale is None:
            return grown.expand(*grown.shape[:-2], q.shape[1], q.shape[2])
        return scale * grown


def queries_of(kv_heads: Sequence[int], group: int) -> list[int]:
    """The query heads of some key/value heads."""
    return [head * group + place for head in kv_heads for place in range(group)]


def heads_of(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of x `[B, H, N, D]`; a view if they are neighbours."""
    first, number = heads[0], len(heads)
    if list(heads) == list(range(first, first + number)):
        return x.narrow(1, first, number)
    return x[:, list(heads)]


def in_order(outs: Sequence[Tensor], heads: Sequence[int]) -> Tensor:
    """Outputs of some heads after those of others, in the order of the heads."""
    joined = torch.cat(list(outs), 1)
    order = sorted(range(len(heads)), key=lambda place: heads[place])
    return joined if order == list(range(len(heads))) else joined[:, order]


def _make_law(described: dict[str, Any] | None) -> FixedScaling | None:
    """The law that a configuration describes, for one head that stands for all."""
    if described is None:
        return None
    settings = dict(described) if isinstance(described, dict) else {}
    name = settings.pop(FAMILY, None)
    if name not in LAWS or settings.keys() != {"strength", "length"}:
        raise UserError(f"the temperature in the configuration is {shown(described)}; what extend writes is needed")
    return LAWS[name](1, **settings)


def extension_of(module: nn.Module) -> Extension | None:
    """The extension of an attention module, if it has one."""
    return vars(module).get(EXTENSION)


def attach_extension(model: PreTrainedModel, settings: ExtensionSettings) -> None:
    """Extend the attention layers of a model that the settings name."""
    from bayesattn.adapt.attention_layers import attention_layers  # whose import may be what registers the backend

    layers = attention_layers(model)
    if wrong := [number for number in settings.layers if number not in layers]:
        raise UserError(f"the model has no attention in layer {wrong[0]}; it has some in {sorted(layers)}")
    ways = rotations(model, {number: layers[number] for number in settings.layers})
    for number, rotation in ways.items():
        hang_extension(layers[number], Extension(settings, rotation, number))


def hang_extension(layer: nn.Module, extension: Extension) -> None:
    """Let an attention layer be extended: it gets no rotations, and its attention function finds the extension."""
    vars(layer)[EXTENSION] = extension
    names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
    layer.register_forward_pre_hook(partial(_without_rotation, names), with_kwargs=True)


def take_off_extension(layer: nn.Module) -> None:
    """Let the layer be what it was."""
    vars(layer).pop(EXTENSION, None)
    for number in hooks_of(layer, _without_rotation):
        del layer._forward_pre_hooks[number], layer._forward_pre_hooks_with_kwargs[number]


def _without_rotation(names: tuple[str, ...], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get(ROTARY) is None:
        return None
    return (), {**given, ROTARY: at_position_zero(given[ROTARY])}
