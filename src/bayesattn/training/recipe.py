"""A recipe: everything a training run depends on, in one YAML file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from bayesattn.data.contexts import LEAST_RETRIEVAL, Mixture
from bayesattn.data.text import BUNDLED
from bayesattn.errors import UserError, no_setting
from bayesattn.models.configuration import BamConfig

# What a recipe can expect of its model.
EXPECTED = ("parameters", "prior_parameters")
# Of a document.
MOST_FACTS = 20
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    tuple: "a list",
    dict: "a section of settings",
}


class RecipeError(UserError):
    """A recipe that cannot be followed, in one sentence."""


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number; by the letter of its older version it is a word."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read(text: str) -> Any:
    return yaml.load(text, _Loader)


@dataclass(frozen=True)
class Data(Mixture):
    """Where the text comes from.

    Args:
        source: as `bayesattn.data.text.documents` takes it.
        text_field: of JSON lines, parquet files and data sets.
        tokenizer: a shipped model, `mistral-v3`, a folder or an id.
        stream: whether texts are packed in the order they come, none held in memory; for text alone.
    """

    source: str = BUNDLED
    text_field: str = "text"
    tokenizer: str = "tokenizer"
    stream: bool = False

    def __post_init__(self) -> None:
        if self.context < 2:
            raise RecipeError(f"data.context is {self.context}; at least 2 tokens are needed")
        for share in ("retrieval", "short", "novel", "early", "swap", "hard", "numbers"):
            most = 0.5 if share == "hard" else 1
            if not 0 <= getattr(self, share) <= most:
                raise RecipeError(f"data.{share} is {getattr(self, share)}; a share from 0 to {most} is needed")
        for weight in ("answer_weight", "filler_weight", "hay_weight"):
            if not 0 <= getattr(self, weight) < math.inf:
                raise RecipeError(f"data.{weight} is {getattr(self, weight)}; it must not be negative")
        for numbers, least in {"facts": 1, "questions": 0}.items():
            given = getattr(self, numbers)
            if not any(given) or not all(type(number) is int and least <= number <= MOST_FACTS for number in given):
                rest = "" if least else ", not all of them 0"
                raise RecipeError(
                    f"data.{numbers} is {list(given)}; whole numbers from {least} to {MOST_FACTS} are needed{rest}"
                )
        if self.retrieval and self.context <= LEAST_RETRIEVAL:
            raise RecipeError(
                f"data.context is {self.context} and data.retrieval {self.retrieval}; there is room for facts and "
                f"questions in more than {LEAST_RETRIEVAL} tokens only, set one of them"
            )
        if self.stream and self.retrieval:
            raise RecipeError(
                f"data.stream is on and data.retrieval {self.retrieval}; streamed text has no questions, set it to 0"
            )


@dataclass(frozen=True)
class Optimisation:
    """How long, how fast.

    Args:
        steps, batch: contexts of `batch` a step, on all devices together.
        stop: end after so many steps, with the rates of a run of `steps`; 0 to go through with it.
        device_batch: contexts that a device takes at a time; 0 for all of its share.
        optimizer: `muon` (Muon for matrices, AdamW for the rest), `adamw` or `radam`.
        lr, matrix_lr, prior_lr: of embeddings and norms (of all for adamw and radam), of matrices under Muon, of the
            priors and temperatures, which have groups of their own and no decay.
        warmup, final: steps of a linear rise, then a cosine to this share of the rate.
        betas, weight_decay, clip: as usual; decay is decoupled.
        evaluate_every, save_every: steps; 0 for never. The model is written at the end in any case.
        precision: `fp32` or `bf16`.
    """

    steps: int = 1000
    stop: int = 0
    batch: int = 16
    device_batch: int = 0
    optimizer: str = "muon"
    lr: float = 2e-3
    matrix_lr: float = 0.02
    prior_lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup: int = 50
    final: float = 0.02
    clip: float = 1.0
    evaluate_every: int = 0
    save_every: int = 250
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.optimizer not in ("muon", "adamw", "radam"):
            raise RecipeError(f"optimizer is {self.optimizer!r}; muon, adamw and radam are allowed")
        if self.precision not in ("fp32", "bf16"):
            raise RecipeError(f"precision is {self.precision!r}; fp32 and bf16 are allowed")
        if self.steps < 1 or self.batch < 1:
            raise RecipeError(f"steps is {self.steps} and batch {self.batch}; both must be at least 1")
        if not 0 <= self.stop <= self.steps:
            raise RecipeError(f"stop is {self.stop}; 0 or a number of steps up to {self.steps:,} is needed")
        if len(self.betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas):
            raise RecipeError(f"betas is {list(self.betas)}; two numbers from 0 to 1 are needed")
        rates = ("lr", "matrix_lr", "prior_lr", "weight_decay", "clip", "final")
        for name in (*rates, "warmup", "device_batch", "evaluate_every", "save_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RecipeError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.final > 1:
            raise RecipeError(f"final is {self.final}; it is the share of the rate at the end, at most 1")

    @property
    def last_step(self) -> int:
        return self.stop or self.steps


@dataclass(frozen=True)
class Recipe:
    """`model` is a preset and changes to it; `expected` numbers of parameters are checked by a dry run.

    `start` is a trained model of the same shape to go on from: a shipped name, a folder, or an id.
    """

    name: str
    seed: int = 0
    start: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    training: Optimisation = field(default_factory=Optimisation)
    expected: dict[str, float] = field(default_factory=dict)

    def config(self, **changes: Any) -> BamConfig:
        """The model's configuration: a preset and changes to it."""
        if "training_length" in self.model:
            raise RecipeError("model.training_length is given; it is data.context, set that")
        settings = {**self.model, "training_length": self.data.context, **changes}
        known = [f.name for f in dataclasses.fields(BamConfig)]
        for key in settings:
            if key != "preset" and key not in known:
                raise RecipeError(no_setting("model", key, ["preset", *known]))
        try:
            return BamConfig.preset(settings.pop("preset", "tiny"), **settings)
        except StrictDataclassError as problem:
            said = str(problem.__cause__ or problem).partition(". Errors:")[0]
            raise RecipeError("model: " + re.sub(r"<class '(\w+)'>", r"\1", said)) from problem
        except (KeyError, TypeError, ValueError) as problem:
            said = str(problem.args[0] if problem.args else problem).strip()
            raise RecipeError(f"model: {said.splitlines()[-1].strip()}") from problem

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `section.key=value` changes.

    `base` in it names a recipe, from its folder on, whose settings it has where it has none of its own; a name and a
    start are not handed on.
    """
    path = Path(path)
    content = _with_base(path)
    for change in changes:
        key, found, value = change.partition("=")
        if not found:
            raise RecipeError(f"{change!r} is not a change; write section.key=value")
        *sections, last = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise RecipeError(f"{key!r} cannot be set; {section!r} is a value and not a section")
        try:
            place[last] = _read(value)
        except yaml.YAMLError as problem:
            raise RecipeError(f"{change!r} is not a change: {value!r} is not YAML") from problem
    content.setdefault("name", path.stem)
    return parse_recipe(content)


def _with_base(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings in a file on top of those of its base, section by section; `above` are the recipes based on it."""
    try:
        content = _read(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise RecipeError(f"there is no recipe {path}" + (f", the base of {above[-1]}" if above else "")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise RecipeError(f"{path} is not YAML: {str(problem).splitlines()[0]}") from problem
    if not isinstance(content, dict):
        raise RecipeError(f"{path} has no settings; name, seed, model, data and training are expected")
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise RecipeError(f"base is {base!r}; the file of a recipe is needed")
    above = (*above, path)
    if (path.parent / base).resolve() in [recipe.resolve() for recipe in above]:
        raise RecipeError(f"{path} is based on {base}, and that on it; a recipe without a base is needed")
    under = _with_base(path.parent / base, above)
    for own in ("name", "start"):
        under.pop(own, None)
    for key, value in content.items():
        both = isinstance(value, dict) and isinstance(under.get(key), dict)
        under[key] = {**under[key], **value} if both else value
    return under


def parse_recipe(content: dict[str, Any]) -> Recipe:
    """A recipe from nested settings; what it does not know it refuses, with the nearest name that it does."""
    sections = {"data": Data, "training": Optimisation}
    made: dict[str, Any] = {}
    known = [f.name for f in dataclasses.fields(Recipe)]
    for key, value in content.items():
        if key == "base":
            raise RecipeError(f"base is changed to {value!r}; it can be set in the recipe's file only")
        if key not in known:
            raise RecipeError(no_setting("recipe", key, ["base", *known]))
        made[key] = _section(key, sections[key], value) if key in sections else value
    for key, kind in {"name": str, "seed": int, "start": str, "model": dict, "expected": dict}.items():
        if key in made and (not isinstance(made[key], kind) or isinstance(made[key], bool)):
            raise RecipeError(f"{key} is {made[key]!r}; {KINDS[kind]} is needed")
    recipe = Recipe(**made)
    if not recipe.name.strip(". ") or set(recipe.name) & set("/\\"):
        raise RecipeError(f"name is {recipe.name!r}; the name of a folder is needed, it is where a run goes")
    if not 0 <= recipe.seed < 2**32:
        raise RecipeError(f"seed is {recipe.seed}; 0 to {2**32 - 1} are allowed")
    for key, number in recipe.expected.items():
        if key not in EXPECTED:
            raise RecipeError(no_setting("expected", key, EXPECTED))
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise RecipeError(f"expected.{key} is {number!r}; a number is needed")
    recipe.config()
    return recipe


def _section(name: str, kind: type[Any], settings: Any) -> Any:
    if not isinstance(settings, dict):
        raise RecipeError(f"{name} is {settings!r}; it must be a section of settings")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in fields:
            raise RecipeError(no_setting(name, key, list(fields)))
        default = fields[key].default
        wanted = float if isinstance(default, float) else type(default)
        if wanted is tuple and isinstance(value, list):
            value = tuple(value)
        if wanted is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            raise RecipeError(f"{name}.{key} is {value!r}; {KINDS.get(wanted, wanted.__name__)} is needed")
        made[key] = value
    return kind(**made)
