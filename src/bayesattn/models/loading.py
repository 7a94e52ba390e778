"""Load any causal model: a shipped one, a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from bayesattn.errors import NotFiniteError, UserError, cut, first_line, is_whole, shown
from bayesattn.files import read_json
from bayesattn.hub import hub_answers
from bayesattn.models.alibi.modeling import BayesBloomForCausalLM, BayesFalconForCausalLM, BayesMptForCausalLM
from bayesattn.models.bam.configuration import LARGEST_SIZES
from bayesattn.models.bam.modeling import BamForCausalLM
from bayesattn.models.decoder import DecoderForCausalLM
from bayesattn.models.delayed_keys.modeling import DelayedKeysForCausalLM
from bayesattn.models.shipped import is_folder, resolve, shipped_names
from bayesattn.models.variants import VARIANTS

# Our model classes by `model_type`.
CAUSAL_MODELS: dict[str, type[BamForCausalLM]] = {"bam": BamForCausalLM, "delayed_keys": DelayedKeysForCausalLM}
# Those that `ba.convert` makes.
CONVERTED_MODELS: dict[str, type[DecoderForCausalLM]] = {
    "bayes_bloom": BayesBloomForCausalLM,
    "bayes_mpt": BayesMptForCausalLM,
    "bayes_falcon": BayesFalconForCausalLM,
}
# Ways to scale rotary positions at inference: interpolated, by the length at hand (NTK), and by frequency (YaRN).
SCALINGS = ("linear", "dynamic", "yarn")
LARGEST_FACTOR = 1_000_000


def load_model(name: str | Path) -> Any:
    """A causal language model in evaluation mode, by a shipped name, a folder, or a Hugging Face id.

    `NAME+yarn:16` (or `linear`, `dynamic`) is the model with its rotary positions scaled for 16 times the length, and
    `NAME+clip:2048` is the model of `bayesattn.extend(model, window=2048)`.
    A model with missing or damaged weights raises an error.
    """
    return load_weights(name, *load_config(name))


def load_weights(
    name: str | Path, config: Any, place: str, settings: dict[str, bool], auto: Any = AutoModelForCausalLM
) -> Any:
    """The model of a configuration, as `load_config` found it; `name` is for errors.

    `auto` loads models that are not ours.
    """
    cls: Any = {**CAUSAL_MODELS, **CONVERTED_MODELS}.get(config.model_type, auto)
    options = {"config": config, "output_loading_info": True, "trust_remote_code": False}
    try:
        try:
            model, info = cls.from_pretrained(place, **options, **settings)
        except OSError:
            if not settings.get("local_files_only") or not hub_answers():
                raise
            model, info = cls.from_pretrained(place, **options)  # the cache has the configuration only
    except UserError:
        raise
    except Exception as problem:  # transformers raises many types of errors for bad files
        raise UserError(f"{name} cannot be loaded: {first_line(problem)}") from problem
    # transformers would leave random weights in their place. The pooler comes after the last layer.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise UserError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    for parameter, weights in model.named_parameters():
        if not _is_finite(weights):
            raise UserError(f"the weights of {name} are not finite, those of {parameter} among them")
    _, variant, number = _split_suffix(str(name))
    return VARIANTS[variant](model.eval(), int(number)) if variant in VARIANTS else model.eval()


@contextmanager
def checked_outputs(model: Any, name: str) -> Iterator[None]:
    """In this block the model raises an error instead of returning logits or hidden states that are not finite.

    A logit of −inf is allowed, because some models exclude tokens in this way, but the largest must be finite. Errors
    about numbers in the model's attention get its name.
    """

    def check(_: Any, __: Any, output: Any) -> None:
        for part in ("logits", "last_hidden_state"):
            values = getattr(output, part, None)
            if values is not None and values.numel() and not values.detach().amax(-1).isfinite().all():
                raise UserError(
                    f"{name} gives {part.replace('_', ' ')} that are not finite, so nothing can be measured"
                )

    hooks = [module.register_forward_hook(check) for module in {model, getattr(model, "base_model", model)}]
    try:
        yield
    except NotFiniteError as problem:
        raise UserError(f"{name} gives numbers that are not finite, so nothing can be measured: {problem}") from problem
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(weights: Any) -> bool:
    """Whether all weights are finite; one pass without a copy. Formats of one byte are not looked at."""
    if weights.is_meta or not weights.numel() or not weights.is_floating_point() or weights.element_size() < 2:
        return True
    least, most = weights.detach().aminmax()
    return bool(least.isfinite() and most.isfinite())


def load_config(name: str | Path) -> tuple[Any, str, dict[str, bool]]:
    """Configuration of a model, where its files are, and the settings to load them with; `name` as for `load_model`."""
    name, scaling, factor = _split_suffix(str(name))
    config, place, settings = _load_config(name)
    if scaling in SCALINGS:
        _scale_rotary(config, name, scaling, factor)
    return config, place, settings


def _split_suffix(name: str) -> tuple[str, str, float]:
    """A model's name, and how its rotary positions are to be scaled or what is to be made of it, if anything."""
    if is_folder(name) or not (suffix := re.fullmatch(r"(.+)\+(\w+)(:[^/]*)?", name)):
        return name, "", 1.0
    model, scaling, given = suffix.groups(default="")
    if not given and scaling not in (*SCALINGS, *VARIANTS):  # a name with a plus sign
        return name, "", 1.0
    factor = given.removeprefix(":")
    number = r"\d{1,9}" if scaling in VARIANTS else r"\d+(\.\d+)?"
    if scaling not in (*SCALINGS, *VARIANTS) or not re.fullmatch(number, factor):
        allowed = ", ".join(f"+{each}:FACTOR" for each in SCALINGS)
        others = "".join(f", or +{each}:TOKENS" for each in VARIANTS)
        raise UserError(
            f"{cut(name)} ends in {cut(f'+{scaling}{given}')!r}; {allowed} are allowed, such as +yarn:16{others}"
        )
    return model, scaling, float(factor)


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
    in_folder, file = is_folder(place), Path(place) / "config.json"
    if in_folder and not file.exists():
        raise UserError(
            f"{cut(name)} has no config.json; a model's folder or one of {', '.join(shipped_names())} is needed"
        )
    if in_folder and not isinstance(content := read_json(file), dict):
        raise UserError(
            f"{cut(name)} is not a model: its config.json is {shown(content)}; names with values are needed"
        )
    local = {} if in_folder else {"local_files_only": True}
    try:
        return _from_files(name, place, **local), place, local
    except UserError:
        raise
    except Exception as problem:  # a damaged file gives many types of errors
        if in_folder:
            raise UserError(f"{cut(name)} is not a model: {_reason(problem)}") from problem
    online = hub_answers()
    hub = "the hub cannot be reached"
    try:
        if online:
            return _from_files(name, place), place, {}
    except UserError:
        raise
    except Exception as problem:
        hub = f"the hub does not give it ({first_line(problem)})"
    raise UserError(f"{cut(name)} is neither a shipped model ({', '.join(shipped_names())}) nor a folder, and {hub}")


def _from_files(name: str, place: str, **settings: bool) -> Any:
    _check_sizes(name, PreTrainedConfig.get_config_dict(place, **settings)[0])
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **settings)
    config.get_text_config()  # may not be there although other parts refer to it
    return config


def _reason(problem: Exception) -> str:
    """What is wrong with a configuration, as a line."""
    if isinstance(problem, StrictDataclassError):  # the first line has the name of the field, the last what is wrong
        return cut(problem, 200)
    return first_line(problem)


def _check_sizes(name: str, content: dict[str, Any]) -> None:
    """Refuse sizes that no model has before transformers reserves memory for them."""
    if isinstance(section := content.get("base_config"), dict):  # a model of transformers that has got priors
        content = section
    text_config = content.get("text_config")
    for values in (content, text_config if isinstance(text_config, dict) else {}):
        for key, most in LARGEST_SIZES.items():
            listed = isinstance(values.get(key), list)  # some architectures have a size for each layer
            if values.get(key) is not None and not listed and not is_whole(values[key], 1, most):
                raise UserError(
                    f"{cut(name)} is not a model: {key} in its config.json is {shown(values[key])}; a whole number "
                    f"from 1 to {most:,} is needed"
                )
