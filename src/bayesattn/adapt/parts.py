"""What `add_prior` hangs on an attention module: a prior, a temperature, and how they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bayesattn.errors import UserError
from bayesattn.models.adapters import in_use

# Names of the modules that hang on an attention module, or on that of the layer that it shares them with.
PRIOR, TEMPERATURE, OWNER = "prior", "temperature", "prior_owner"
# Whether temperatures multiply the prior too; a plain attribute of the attention module.
SCALE_PRIOR = "scale_prior"
# The argument with which a layer gets the cosines and sines of its rotary positions.
ROTARY = "position_embeddings"
# The share of its own positional encoding that a layer sees; a plain attribute.
ROPE_SHARE = "rope_share"
SUPPORTED = (
    "decoders whose attention goes through transformers' AttentionInterface are supported, such as Llama, Mistral, "
    "Qwen, Gemma, Phi, GPT-NeoX, OLMo and GPT-2; GPT-J is not, and `bayesattn convert` takes BLOOM, MPT and Falcon"
)


def num_heads(layer: nn.Module) -> int:
    """Query heads of an attention layer."""
    config: Any = getattr(layer, "config", None)
    heads = getattr(layer, "num_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise UserError(f"{type(layer).__name__} does not say how many heads it has; {SUPPORTED}")
    return heads


def prior_of(module: nn.Module) -> Any:
    """The prior of an attention module, or what somebody has wrapped around it; None if it has none."""
    return in_use(getattr(getattr(module, OWNER, module), PRIOR, None))


def temperature_of(module: nn.Module, window: int | None) -> Callable[[Tensor], Tensor] | None:
    """The temperature of an attention module, for the keys in the model's own window alone."""
    temperature: nn.Module | None = in_use(getattr(getattr(module, OWNER, module), TEMPERATURE, None))
    return temperature if temperature is None or window is None else WithinWindow(temperature, window)


def scales_prior(module: nn.Module) -> bool:
    """Whether the temperatures of an attention module multiply its prior too."""
    return getattr(module, SCALE_PRIOR, True)


def hooks_of(layer: nn.Module, function: Callable[..., Any]) -> list[int]:
    """Numbers of a module's forward pre-hooks that are this function, or a partial one of it.

    They are looked up because the handle of a hook does not know the copies of its module.
    """
    hooks = layer._forward_pre_hooks.items()
    return [number for number, hook in hooks if getattr(hook, "func", hook) is function]


class WithinWindow(nn.Module):
    """A temperature for queries that see no more keys than a window has."""

    def __init__(self, temperature: nn.Module, window: int) -> None:
        super().__init__()
        self.temperature, self.window = temperature, window

    def forward(self, visible: Tensor) -> Tensor:
        return self.temperature(visible.clamp(max=self.window))
