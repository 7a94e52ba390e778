"""The rotary positions of a model of transformers, which an extended model computes itself.

The attention layers of Llama and its family get cosines and sines of their positions from one module of the model.
Given those of position 0 they leave queries and keys as they are, and so does their cache.

Shape letters: B batch, H heads, N tokens, D head size, R rotated part of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesattn.adapt.parts import ROTARY
from bayesattn.errors import UserError

if TYPE_CHECKING:  # importing it is what registers the backend, which needs this module
    from transformers import PreTrainedModel

# The function of a modeling file that rotates queries and keys `[B, H, N, D]` by cosines and sines `[1, N, R]`.
APPLY = "apply_rotary_pos_emb"
# Frequencies that depend on the length of the text: a cached key would have to be rotated by others later.
CHANGING = ("dynamic", "longrope")
SUPPORTED = "rotary positions as those of Llama, Mistral, Qwen, Gemma, Phi-3, OLMo and SmolLM are supported"


class Rotation:
    """Rotates queries or keys of attention layers to positions, as their model does.

    Args:
        rotary: the module of the model that makes cosines and sines.
        layer_type: the kind of layer, for a module that has several.
        apply: the function of the model that rotates by them.
    """

    def __init__(self, rotary: nn.Module, layer_type: str | None, apply: Callable[..., Any]) -> None:
        self.rotary, self.layer_type, self.apply = rotary, layer_type, apply
        self._known: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        return Rotation(copy.deepcopy(self.rotary, memo), self.layer_type, self.apply)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x `[B, H, N, D]` rotated to the positions `[N]` or `[B, N]`, or all of it to one `[1]`, at least 0."""
        length = int(positions.max()) + 1 if positions.numel() else 1
        cos, sin = (part[0, positions.reshape(-1, positions.shape[-1])] for part in self._tables(x, length))
        return self._apply(x, cos, sin)

    def at_range(self, x: Tensor, first: int) -> Tensor:
        """x `[B, H, N, D]` rotated to the positions `first` and following."""
        stop = first + x.shape[2]
        return self._apply(x, *(part[:, first:stop] for part in self._tables(x, stop)))

    def scaling(self) -> float:
        """The factor on cosines and sines, which YaRN has."""
        name = "attention_scaling" if self.layer_type is None else f"{self.layer_type}_attention_scaling"
        return float(getattr(self.rotary, name, 1.0))

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = self.apply(x, x[:, :0], cos, sin)[0]
        return rotated

    def _tables(self, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least so many positions, `[1, n, R]` each."""
        if torch.compiler.is_compiling():
            return self._make(like, length)
        at = like.device, like.dtype
        if at not in self._known or self._known[at][0].shape[1] < length:
            with torch.inference_mode(False):  # a later call may need gradients
                self._known[at] = self._make(torch.empty(0, device=like.device, dtype=like.dtype), 2 * length)
        return self._known[at]

    def _make(self, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=like.device).unsqueeze(0)
        kind = () if self.layer_type is None else (self.layer_type,)
        cos, sin = self.rotary(like, positions, *kind)
        return cos, sin


def rotations(model: PreTrainedModel, layers: dict[int, nn.Module]) -> dict[int, Rotation]:
    """How each of these attention layers rotates its queries and keys; layers of one kind share a rotation.

    Raises:
        UserError: one sentence, for models without rotary positions or with others than are known.
    """
    name = type(model).__name__
    for layer in layers.values():
        if ROTARY not in inspect.signature(inspect.unwrap(type(layer).forward)).parameters:
            raise UserError(f"{name} has no rotary positions that reach its attention as {ROTARY!r}; {SUPPORTED}")
    makers = [module for module in model.modules() if hasattr(module, "rope_type")]
    if len(makers) != 1:
        raise UserError(f"{name} has {len(makers)} modules of rotary positions and one is needed; {SUPPORTED}")
    maker: Any = makers[0]
    kinds = maker.rope_type if isinstance(maker.rope_type, dict) else {"": maker.rope_type}
    if changing := [kind for kind in kinds.values() if kind in CHANGING]:
        raise UserError(f"the rotary positions of {name} are {changing[0]!r}, which depend on the length of the text")
    by_type = "layer_type" in inspect.signature(inspect.unwrap(maker.forward)).parameters
    made: dict[Any, Rotation] = {}
    result = {}
    for number, layer in layers.items():
        apply = inspect.unwrap(type(layer).forward).__globals__.get(APPLY)
        if apply is None:
            raise UserError(f"{type(layer).__name__} rotates its keys in a way that is not known; {SUPPORTED}")
        layer_type = model.config.get_text_config().layer_types[number] if by_type else None
        key = layer_type, apply
        result[number] = made.setdefault(key, Rotation(maker, layer_type, apply))
    return result


def at_position_zero(rotary: Any) -> Any:
    """What a layer gets as its rotary positions so that it does not rotate, or an error."""
    if not isinstance(rotary, tuple) or len(rotary) != 2 or any(x.is_complex() for x in rotary):
        raise UserError(f"a layer gets its rotary positions as a {type(rotary).__name__}; cosines and sines are needed")
    cos, sin = rotary
    return torch.ones_like(cos), torch.zeros_like(sin)
