"""Load any causal model: a shipped one, a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bayesattn.errors import UserError, cut, first_line
from bayesattn.hub import hub_answers
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.models.delayed_keys.modeling import DelayedKeysForCausalLM
from bayesattn.models.shipped import is_folder, resolve, shipped

# Our model classes by `model_type`.
CAUSAL_MODELS: dict[str, type[BamForCausalLM]] = {"bam": BamForCausalLM, "delayed_keys": DelayedKeysForCausalLM}
# Ways to scale rotary positions at inference: interpolated, by the length at hand (NTK), and by frequency (YaRN).
SCALINGS = ("linear", "dynamic", "yarn")
LARGEST_FACTOR = 1_000_000


def load_model(name: str | Path) -> Any:
    """A causal language model in evaluation mode, by a shipped name, a folder, or a Hugging Face id.

    `NAME+yarn:16` (or `linear`, `dynamic`) is the model with its rotary positions scaled for 16 times the length.
    A model with missing or damaged weights raises an error.
    """
    return load_weights(name, *load_config(name))


def load_weights(name: str | Path, config: Any, place: str, settings: dict[str, bool]) -> Any:
    """The model of a configuration, as `load_config` found it; `name` is for errors."""
    try:
        cls: Any = CAUSAL_MODELS.get(config.model_type, AutoModelForCausalLM)
        model, info = cls.from_pretrained(place, config=config, output_loading_info=True, **settings)
    except UserError:
        raise
    except Exception as problem:  # transformers raises many types of errors for bad files
        raise UserError(f"{name} cannot be loaded: {first_line(problem)}") from problem
    if missing := sorted(info["missing_keys"]):  # transformers would leave random ones in their place
        raise UserError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return model.eval()


def load_config(name: str | Path) -> tuple[Any, str, dict[str, bool]]:
    """Configuration of a model, where its files are, and the settings to load them with; `name` as for `load_model`."""
    name, scaling, factor = _split_scaling(str(name))
    config, place, settings = _load_config(name)
    if scaling:
        _scale_rotary(config, name, scaling, factor)
    return config, place, settings


def _split_scaling(name: str) -> tuple[str, str, float]:
    """A model's name, and how its rotary positions are to be scaled, if they are."""
    scaled = re.fullmatch(rf"(.+)\+({'|'.join(SCALINGS)}):(\d+(?:\.\d+)?)", name)
    if scaled is None or is_folder(name):
        return name, "", 1.0
    return scaled[1], scaled[2], float(scaled[3])


def _scale_rotary(config: Any, name: str, scaling: str, factor: float) -> None:
    known = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in known or getattr(config, "position", "rope") != "rope":
        raise UserError(f"{name} has no rotary positions that could be scaled ({scaling}:{factor:g})")
    if not 1 <= factor <= LARGEST_FACTOR:
        raise UserError(
            f"rotary positions of {name} are to be scaled by {factor:g}; at least 1 and at most {LARGEST_FACTOR:,} is "
            "needed"
        )
    trained = getattr(config, "training_length", None) or config.max_position_embeddings
    config.rope_parameters = {
        **known, "rope_type": scaling, "factor": factor, "original_max_position_embeddings": int(trained)
    }  # fmt: skip


def _load_config(name: str) -> tuple[Any, str, dict[str, bool]]:
    disable_progress_bar()  # loading is too fast for one
    place = resolve(name)
    local = is_folder(place)
    if local and not (Path(place) / "config.json").exists():
        raise UserError(f"{cut(name)} has no config.json; a model's folder or one of {', '.join(shipped())} is needed")
    online = local or hub_answers()
    settings = {} if local else {"local_files_only": not online}
    try:
        return AutoConfig.from_pretrained(place, **settings), place, settings
    except (OSError, ValueError, StrictDataclassError) as problem:
        if local:
            raise UserError(f"{cut(name)} is not a model: {first_line(problem)}") from problem
        hub = f"the hub does not give it ({first_line(problem)})" if online else "the hub cannot be reached"
        raise UserError(
            f"{cut(name)} is neither a shipped model ({', '.join(shipped())}) nor a folder, and {hub}"
        ) from problem
