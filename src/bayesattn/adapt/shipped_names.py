"""Auto classes of transformers take the name of a shipped model, which they would otherwise look for on the hub."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from bayesattn.models.shipped import shipped, shipped_names

# Auto classes that load our models, by the module that defines them.
CLASSES = {
    "transformers.models.auto.configuration_auto": ("AutoConfig",),
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer",),
    "transformers.models.auto.modeling_auto": (
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
    ),
}
NAME = "pretrained_model_name_or_path"
_changed: set[type] = set()


def register() -> None:
    """Let the Auto classes whose modules are imported take our names. A second call changes nothing."""
    for module, classes in CLASSES.items():
        for name in classes:
            auto = getattr(sys.modules.get(module), name, None)
            if auto is not None and auto not in _changed:
                _changed.add(auto)
                _take_names(auto)


def _take_names(auto: Any) -> None:
    load = auto.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = _folder(args[0]), *args[1:]
        elif NAME in kwargs:
            kwargs[NAME] = _folder(kwargs[NAME])
        return load(cls, *args, **kwargs)

    auto.from_pretrained = classmethod(from_pretrained)


def _folder(name: Any) -> Any:
    """The folder of a shipped model, or what is given. A folder of that name in the working directory comes first."""
    return shipped(name) if isinstance(name, str) and name in shipped_names() and not Path(name).exists() else name
