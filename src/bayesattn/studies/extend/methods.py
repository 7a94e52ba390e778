"""The methods that are compared, as models: those of transformers by their suffix, ours by `extend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bayesattn.adapt.extend import extend_any
from bayesattn.errors import UserError
from bayesattn.evaluation.reader import Reader, load_reader

# Methods that transformers has: the suffix of a model's name.
SCALED = {"interpolation": "linear", "ntk": "dynamic", "yarn": "yarn"}


@dataclass(frozen=True)
class Sizes:
    """The numbers that the methods have, for the longest length.

    Args:
        window: distances below it are as they were.
        sinks: first tokens that a window keeps.
        factor: of the longest length to the training length, at least 1.
        group: of SelfExtend: the fewest tokens of a group with which no position exceeds the training length.
    """

    window: int
    sinks: int
    factor: float
    group: int

    def to_dict(self) -> dict[str, Any]:
        """For the settings of a result."""
        return asdict(self)


def make_sizes(window: int, sinks: int, longest: int, train_length: int) -> Sizes:
    """The numbers for prompts of up to `longest` tokens."""
    if not 1 <= window < train_length:
        raise UserError(
            f"--window is {window:,}; the model was trained to {train_length:,} tokens, so a whole number from 1 to "
            f"{train_length - 1:,} is needed"
        )
    group = max(2, -(-(longest - window) // (train_length - window)))
    while (longest - 1) // group + window - window // group >= train_length:
        group += 1
    return Sizes(window, sinks, max(1.0, longest / train_length), group)


def load_method(
    method: str, model: str, tokenizer: str | None, sizes: Sizes, near: Sequence[Sequence[int]] | None = None
) -> Reader:
    """The reader of a model under a method, by its name; the model is loaded anew, since extending changes it.

    `near` are the heads that look only near, for the method that has some.
    """
    suffix = f"+{SCALED[method]}:{sizes.factor:.6f}" if method in SCALED else ""
    reader = load_reader(model + suffix, tokenizer)
    if method in SCALED or method == "as-is":
        return replace(reader, name=method)
    kind, *others = method.split("+")
    ways: dict[str, dict[str, Any]] = {
        "grouped": {"group": sizes.group},
        "window": {"sinks": sizes.sinks},
        "clip": {} if near is None else {"near": near, "sinks": sizes.sinks},
    }
    law: Any = "log" if "log" in others else None
    extended = extend_any(
        reader.model, sizes.window, temperature=law, train_length=reader.train_length, **ways[kind]
    )  # fmt: skip
    if ways[kind] and getattr(extended.config.get_text_config(), "sliding_window", None):
        extended.generation_config.use_cache = False  # the cache of a sliding window drops tokens that these count from
    return replace(reader, name=method, model=extended.eval())
