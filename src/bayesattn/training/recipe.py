"""A recipe: everything that a training run depends on, in one YAML file."""

# No `from __future__ import annotations`: `strict` checks real types and not strings.
import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from bayesattn.data.mixture import Mixture, Number, check_most
from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError, no_setting, one_line, plain_errors, shown
from bayesattn.models.bam.configuration import BamConfig
from bayesattn.models.delayed_keys.configuration import DelayedKeysConfig
from bayesattn.training.plain_values import check_plain, read_with_bases, read_yaml

# Configurations by the model types of a recipe.
MODEL_TYPES: dict[str, type[BamConfig]] = {"bam": BamConfig, "delayed_keys": DelayedKeysConfig}
# Bytes of the name of a run, which is that of its folder.
LONGEST_NAME = 200
# Keys of `expected`.
EXPECTED = ("parameters", "prior_parameters")
# Former names of settings.
RENAMED = {
    "model.crowd": "augmentation.in_batch_negatives",
    "model.temperature_jitter": "augmentation.temperature_jitter",
    "model.reading_layers": "model.cross_layers, of type delayed_keys",
    "model.hindsight": "model.key_delay, of type delayed_keys",
    "model.hindsight_heads": "model.delayed_heads, of type delayed_keys",
    "data.retrieval": "data.retrieval_share",
    "data.short": "data.short_share",
    "data.novel": "data.novel_share",
    "data.early": "data.early_share",
    "data.swap": "data.swap_share",
    "data.hard": "data.hard_share",
    "data.numbers": "data.numbers_share",
}


class RecipeError(UserError):
    """A mistake in a recipe, in one sentence, on one line."""

    def __init__(self, sentence: str) -> None:
        super().__init__(one_line(sentence))


@plain_errors
@strict
@dataclass
class Data(Mixture):
    """The section `data`: where the text comes from, and what contexts are made of."""

    source: str = BUNDLED
    """`bundled`, a file or folder, or a Hugging Face dataset, as for `bayesattn.data.text.documents`."""

    text_field: str = "text"
    """Name of the field or column with the text, in JSON lines, parquet files and datasets."""

    tokenizer: str = "tokenizer"
    """A shipped model, `mistral-v3`, a folder, or a Hugging Face id."""

    stream: bool = False
    """Whether to pack texts in their order without holding them in memory. Streams have no retrieval documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream and self.retrieval_share:
            raise UserError(
                f"stream is on and retrieval_share {self.retrieval_share}; a stream has no retrieval documents, so a "
                "share of 0 is needed"
            )


@plain_errors
@strict
@dataclass
class Augmentation:
    """The section `augmentation`: what training does to the model's attention, during training only."""

    in_batch_negatives: int = 0
    """Other contexts of a device's part of the batch whose keys compete, at most; 0 for none.

    Heads with Scalable Softmax see these keys in the last quarter of each context, at the same distances as their own.
    Every layer draws their number in every step: 0, 1, 3, 7 and so on, up to this limit.
    """

    temperature_jitter: list[Number] | None = None
    """Range of a random factor on Scalable-Softmax temperatures, smaller bound first.

    Half of the sequences get a factor, drawn log-uniformly. So the sharper attention of long texts is not new to the
    model.
    """

    def __post_init__(self) -> None:
        if self.in_batch_negatives < 0:
            raise UserError(
                f"in_batch_negatives is {self.in_batch_negatives}; a number of other contexts is needed, 0 for none"
            )
        check_most(self, {"in_batch_negatives": 10**6})
        jitter = self.temperature_jitter
        if jitter is not None and not (len(jitter) == 2 and 0 < jitter[0] <= jitter[1] <= 10**6):
            raise UserError(f"temperature_jitter is {jitter}; two positive numbers are needed, the smaller first")


@plain_errors
@strict
@dataclass
class Training:
    """The section `training`: steps, optimizer, checkpoints."""

    steps: int = 1000
    """Optimizer steps of the learning-rate schedule."""

    stop: int = 0
    """Step to stop after, with the schedule of all `steps`; 0 for no early stop."""

    batch: int = 16
    """Contexts of a step, over all devices."""

    device_batch: int = 0
    """Contexts that a device processes at a time; 0 for its whole share of the batch."""

    optimizer: Literal["muon", "adamw", "radam"] = "muon"
    """`muon` is Muon for matrices and AdamW for the rest."""

    lr: Number = 2e-3
    """Learning rate of embeddings and norms; with `adamw` and `radam`, of matrices too."""

    matrix_lr: Number = 0.02
    """Learning rate of matrices with `muon`."""

    prior_lr: Number = 1e-2
    """Learning rate of priors and temperatures, which have no weight decay."""

    betas: tuple[Number, Number] = (0.9, 0.95)
    """Decay rates of the moments in AdamW and RAdam."""

    weight_decay: Number = 0.01
    """Decoupled weight decay."""

    warmup: int = 50
    """Steps in which learning rates rise linearly; then they fall along a cosine."""

    final: Number = 0.02
    """Share of the learning rates that is left at the last step."""

    clip: Number = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down."""

    evaluate_every: int = 0
    """Steps between evaluations of retrieval; 0 for none."""

    save_every: int = 250
    """Steps between checkpoints; 0 for none. The final model is saved in any case."""

    freeze: tuple[str, ...] = ()
    """Names of parameters that are not trained, with * for any text: `*.own_prior.*` are the priors."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward and backward pass."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if not 0 <= self.stop <= self.steps:
            raise UserError(f"stop is {self.stop}; 0 or a number of steps up to {self.steps:,} is needed")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas is {list(self.betas)}; two numbers from 0 up to 1 are needed")
        rates = ("lr", "matrix_lr", "prior_lr", "weight_decay", "clip", "final")
        for name in (*rates, "warmup", "device_batch", "evaluate_every", "save_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; a number of at least 0 is needed")
        many, large = ("steps", "warmup", "evaluate_every", "save_every", "clip"), (*rates, "batch", "device_batch")
        check_most(self, dict.fromkeys(large, 10**6) | dict.fromkeys(many, 10**9))
        if self.final > 1:
            raise UserError(f"final is {self.final}; a share of the learning rate from 0 to 1 is needed")

    @property
    def last_step(self) -> int:
        return self.stop or self.steps


# Sections with settings of their own; those of `model` are in its configuration.
SECTIONS: dict[str, type[Any]] = {"data": Data, "augmentation": Augmentation, "training": Training}


@plain_errors
@strict
@dataclass
class Recipe:
    """All sections of a recipe.

    Raises:
        UserError: a setting has the wrong type.
        RecipeError: a setting is out of range, or does not fit another.
    """

    name: str
    """Name of the run, and of its folder."""

    seed: int = 0
    """Seed of the weights, the contexts and the augmentation."""

    start: str = ""
    """A trained model of the same shape to start from: a shipped name, a folder, or a Hugging Face id.

    With another position in `model` than it has, priors and temperatures are new, and its own are left out.
    """

    model: dict[str, Any] = field(default_factory=dict)
    """A `type` (`bam` or `delayed_keys`), a `preset` and changes to it; `BamConfig` and `DelayedKeysConfig` have the
    settings."""

    data: Data = field(default_factory=Data)
    """Text, tokenizer, and what contexts are made of."""

    augmentation: Augmentation = field(default_factory=Augmentation)
    """What training does to the model's attention."""

    training: Training = field(default_factory=Training)
    """Steps, optimizer, checkpoints."""

    expected: dict[str, Number] = field(default_factory=dict)
    """Numbers of `parameters` and `prior_parameters` that a dry run checks."""

    def __post_init__(self) -> None:
        if not self.name.strip(". ") or set(self.name) & set("/\\"):
            raise RecipeError(f"name is {shown(self.name)}; the name of a folder is needed, where the run is kept")
        if len(self.name.encode()) > LONGEST_NAME:
            raise RecipeError(f"name is {shown(self.name)}; a name of at most {LONGEST_NAME} bytes is needed")
        if not 0 <= self.seed < 2**32:
            raise RecipeError(f"seed is {self.seed}; 0 to {2**32 - 1} are allowed")
        for key in self.expected:
            if key not in EXPECTED:
                raise RecipeError(no_setting("expected", key, EXPECTED))
        scalable = self.config().scalable_heads()
        if self.augmentation.in_batch_negatives and not any(map(any, scalable)):
            raise RecipeError(
                f"augmentation.in_batch_negatives is {self.augmentation.in_batch_negatives} and no head has Scalable "
                "Softmax; set model.scalable_softmax"
            )
        if self.augmentation.in_batch_negatives and self.config().sinks:
            raise RecipeError(
                f"augmentation.in_batch_negatives is {self.augmentation.in_batch_negatives} and model.sinks "
                f"{self.config().sinks}; keys of other contexts have no sinks, so one of the two must be 0"
            )
        if self.augmentation.temperature_jitter is not None and not any(map(any, scalable)):
            raise RecipeError(
                f"augmentation.temperature_jitter is {self.augmentation.temperature_jitter} and no head has Scalable "
                "Softmax; set model.scalable_softmax, or the jitter to null"
            )

    def config(self, **changes: Any) -> BamConfig:
        """The configuration of the model: the preset, the recipe's changes, then `changes`."""
        if "training_length" in self.model:
            raise RecipeError("model.training_length is given; it is data.context, set that")
        settings = {**self.model, "training_length": self.data.context, **changes}
        kind = settings.pop("type", "bam")
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            raise RecipeError(f"model.type is {shown(kind)}; {' and '.join(MODEL_TYPES)} are allowed")
        config_class = MODEL_TYPES[kind]
        known = _own_settings(config_class)
        for key in settings:
            _check_renamed("model", key)
            if key != "preset" and key not in known:
                for other, other_class in MODEL_TYPES.items():
                    if key in _own_settings(other_class):
                        raise RecipeError(f"model.{key} is given and model.type is {kind}; it is a setting of {other}")
                raise RecipeError(no_setting("model", key, ["type", "preset", *known]))
        preset = settings.pop("preset", "tiny")
        if not isinstance(preset, str):
            raise RecipeError(f"model.preset is {shown(preset)}; a word is needed")
        try:
            return config_class.preset(preset, **settings)
        except (KeyError, StrictDataclassError, TypeError, ValueError) as problem:
            message = str(problem.args[0] if problem.args else problem).strip().splitlines()[-1].strip()
            raise RecipeError(f"model{'.' if message.split()[0] in known else ': '}{message}") from problem

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _own_settings(config_class: type[BamConfig]) -> list[str]:
    """Settings that our configurations declare, and check; others of transformers have no effect on training."""
    kinds = [kind for kind in config_class.__mro__ if issubclass(kind, BamConfig)]
    declared = {name for kind in kinds for name in inspect.get_annotations(kind)}
    return [f.name for f in dataclasses.fields(config_class) if f.name in declared]


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `section.key=value` changes.

    Its key `base` names another recipe, relative to the file. Settings that the file lacks come from there, except
    `name` and `start`.
    """
    path = Path(path)
    try:
        content = read_with_bases(path)
    except UserError as problem:
        raise RecipeError(str(problem)) from problem
    for change in changes:
        _change(content, change)
    content.setdefault("name", path.stem)
    return parse_recipe(content)


def _change(content: dict[str, Any], change: str) -> None:
    """Make one `section.key=value` change; no value is the empty word if the setting is a word, and null if not."""
    key, equals, value = change.partition("=")
    if not equals:
        raise RecipeError(f"{shown(change)} is not a change; write section.key=value")
    *sections, last = key.split(".")
    place = content
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise RecipeError(f"{shown(key)} cannot be set; {shown(section)} is a value and not a section")
    try:
        place[last] = "" if not value.strip() and _is_word(key) else read_yaml(value)
    except UserError as problem:
        raise RecipeError(
            f"{shown(change)} is not a change: {shown(value)} is not YAML of plain values: {problem}"
        ) from problem


def _is_word(setting: str) -> bool:
    """Whether a setting, such as `data.tokenizer`, is a word."""
    section, _, name = setting.rpartition(".")
    kind = SECTIONS.get(section) if section else Recipe
    return kind is not None and any(f.name == name and f.type is str for f in dataclasses.fields(kind))


def parse_recipe(content: Mapping[str, Any]) -> Recipe:
    """A recipe from nested settings.

    Raises:
        RecipeError: a setting is unknown, has the wrong type, is out of range, or does not fit another.
    """
    try:
        check_plain(content)
    except UserError as problem:
        raise RecipeError(str(problem)) from problem
    if "base" in content:
        raise RecipeError(f"base is changed to {shown(content['base'])}; it can be set in the recipe's file only")
    known = [f.name for f in dataclasses.fields(Recipe)]
    settings: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise RecipeError(no_setting("recipe", key, ["base", *known]))
        settings[key] = _section(key, SECTIONS[key], value) if key in SECTIONS else value
    return _build(Recipe, settings, prefix="")


def _section(name: str, kind: type[Any], settings: Any) -> Any:
    if not isinstance(settings, dict):
        raise RecipeError(f"{name} is {shown(settings)}; a section of settings is needed")
    annotations = {f.name: f.type for f in dataclasses.fields(kind)}
    for key in settings:
        _check_renamed(name, key)
        if key not in annotations:
            raise RecipeError(no_setting(name, key, list(annotations)))
    return _build(kind, settings, prefix=f"{name}.")


def _check_renamed(section: str, key: object) -> None:
    if (before := f"{section}.{key}") in RENAMED:
        raise RecipeError(f"{before} is now {RENAMED[before]}")


def _build(kind: type[Any], settings: dict[str, Any], prefix: str) -> Any:
    """An instance of a strict dataclass; errors name the field with `prefix` before it."""
    annotations = {f.name: f.type for f in dataclasses.fields(kind)}
    values = {
        key: tuple(value) if isinstance(value, list) and get_origin(annotations[key]) is tuple else value
        for key, value in settings.items()
    }
    try:
        return kind(**values)
    except RecipeError:
        raise
    except UserError as problem:
        raise RecipeError(f"{prefix}{problem}") from problem
