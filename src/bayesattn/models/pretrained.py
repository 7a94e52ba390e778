"""Loading and saving of all our models: shipped names, short errors, a module for `trust_remote_code`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import PreTrainedModel

from bayesattn.errors import UserError
from bayesattn.models.shipped import resolve


class BayesPreTrainedModel(PreTrainedModel):
    """Base class of all our models. `from_pretrained` also takes the name of a shipped model."""

    new_weights: ClassVar[tuple[str, ...]] = ()
    """Starts of names of weights that a checkpoint need not have, because they are for a new task."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        folder = resolve(name)
        config_class: Any = cls.config_class
        own, kind = config_class.model_type, _model_type(Path(folder) / "config.json")
        if kind is not None and kind != own:
            raise UserError(f"{name} is a {kind} model and not a {own} model; load it with bayesattn.load_model")
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        try:
            loaded: Any = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        except SafetensorError as problem:
            raise UserError(f"the weights of {name} are damaged or cut short ({problem})") from problem
        except RuntimeError as problem:
            if "mismatched" not in str(problem):
                raise
            raise UserError(f"the weights of {name} do not have the shapes of its configuration") from problem
        model, info = loaded
        if missing := sorted(key for key in info["missing_keys"] if not key.startswith(cls.new_weights)):
            raise UserError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
        model.reset_config_buffers()
        return (model, info) if with_info else model

    def reset_config_buffers(self) -> None:
        """Set buffers to the configuration's values, whatever was loaded with the weights."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model, with a module that imports its classes from this package.

        With it, Auto classes load the folder in programs that have not imported our models, by
        `trust_remote_code=True`.
        """
        config = type(self.config)
        module, family = f"{config.model_type}_code", config.__name__.removesuffix("Config")
        classes = {
            "AutoConfig": f"{family}Config",
            "AutoModel": f"{family}Model",
            "AutoModelForCausalLM": f"{family}ForCausalLM",
        }
        self.config.auto_map = {auto: f"{module}.{name}" for auto, name in classes.items()}
        super().save_pretrained(save_directory, *args, **kwargs)
        if Path(save_directory).is_dir():  # only the main process writes
            (Path(save_directory) / f"{module}.py").write_text(remote_code(list(classes.values())))


def remote_code(classes: list[str]) -> str:
    """Source of a module that re-exports these classes of this package."""
    names = sorted(classes)
    exported = ", ".join(f'"{name}"' for name in names)
    return (
        '"""The code of this model is in the package bayesattn."""\n\n'
        f"from bayesattn import {', '.join(names)}\n\n__all__ = [{exported}]\n"
    )


def _model_type(file: Path) -> str | None:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError):
        return None  # not there, or not readable: transformers says so
