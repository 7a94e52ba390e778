"""Values of a recipe: YAML of plain values, bounded before anything is built from them.

Aliases, tags and duplicate keys are refused: an alias can stand for more text than any memory holds.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bayesattn.errors import UserError, shown

# Characters of a recipe, sections inside sections, the largest number, and characters of a word.
MOST_CHARACTERS = 100_000
MOST_LEVELS = 12
LARGEST_NUMBER = 10**15
LONGEST_WORD = 4096
# Recipes that build on one another.
MOST_BASES = 16
# Bytes between two slashes of a word: no file has a longer name.
LONGEST_NAME = 255
# Characters of a number: Python takes no more than 4,300 digits.
LONGEST_NUMBER = 100

PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class _Loader(yaml.SafeLoader):
    """YAML of plain values in which 1e-3 is a number; in YAML 1.1 it is a string. Dates are words."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag in PLAIN_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in PLAIN_TAGS}  # noqa: RUF012
    levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused("an alias", "its value is needed in its place", event)
        if getattr(event, "tag", None) not in (None, "!", *PLAIN_TAGS):
            raise _refused(f"the tag {shown(event.tag)}", "a plain value is needed", event)
        if self.levels == MOST_LEVELS:
            raise _refused("deep nesting", f"at most {MOST_LEVELS} levels are allowed", event)
        self.levels += 1
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("a key of several values", "a word is needed", key_node)
            key = self.construct_object(key_node)
            if key in keys:
                raise _refused(f"the key {shown(key)} a second time", "each is allowed once", key_node)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag == PLAIN_TAGS[2] and len(node.value) > LONGEST_NUMBER:
            raise _refused(f"a number of {len(node.value):,} characters", f"at most {LONGEST_NUMBER} are allowed", node)
        return super().construct_scalar(node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _refused(given: str, needed: str, place: Any) -> UserError:
    return UserError(f"line {place.start_mark.line + 1} has {given}; {needed}")


def read_yaml(text: str) -> Any:
    """The plain values that a text in YAML holds.

    Raises:
        UserError: why it cannot be read, to be put after the name of the file.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are allowed")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as problem:
        line = f"line {problem.problem_mark.line + 1}: " if problem.problem_mark else ""
        raise UserError(f"{line}{problem.problem}") from problem
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, TypeError, KeyError, IndexError) as problem:
        # PyYAML raises all but the first for words that are tagged as another kind, such as !!int x.
        raise UserError(" ".join(str(problem).split())) from problem


def read_with_bases(path: Path, derived: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings in a file on top of those of its base, section by section; `derived` recipes are based on it."""
    check_plain(str(path), "the path of the recipe")
    content = _read_file(path, derived)
    if not isinstance(content, dict):
        raise UserError(f"{path} has no settings; name, seed, model, data and training are expected")
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise UserError(f"base is {shown(base)}; the file of a recipe is needed")
    check_plain(base, "base")
    if len(derived) == MOST_BASES:
        raise UserError(
            f"{path} is based on {base}; at most {MOST_BASES} recipes that build on one another are allowed"
        )
    derived = (*derived, path)
    if os.path.realpath(path.parent / base) in [os.path.realpath(recipe) for recipe in derived]:
        raise UserError(f"{path} is based on {base}, and that on it; a recipe without a base is needed")
    merged = read_with_bases(path.parent / base, derived)
    for own in ("name", "start"):
        merged.pop(own, None)
    for key, value in content.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _read_file(path: Path, derived: tuple[Path, ...]) -> Any:
    """The values in a recipe's file."""
    try:
        with path.open("rb") as file:
            # No more than can be a recipe, whatever the file is.
            return read_yaml(file.read(4 * MOST_CHARACTERS + 4).decode("utf-8-sig"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        base_of = f", the base of {derived[-1]}" if derived else ""
        raise UserError(f"there is no recipe {path}{base_of}") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{path} is not YAML: it is not text in UTF-8") from problem
    except OSError as problem:
        raise UserError(f"the recipe {path} cannot be read: {problem.strerror}") from problem
    except UserError as problem:
        raise UserError(f"{path} is not YAML of plain values: {problem}") from problem


def check_plain(value: object, name: str = "", levels: int = 0) -> None:
    """Raise a UserError for a value that no setting can have, whichever it is; `name` is that of the setting."""
    if isinstance(value, (Mapping, list, tuple)):
        if levels == MOST_LEVELS:
            raise UserError(f"{shown(name)} has more than {MOST_LEVELS} levels of sections or lists")
        if isinstance(value, Mapping):
            for key, part in value.items():
                if isinstance(key, str):
                    _check_word(key, f"a setting of {name}" if name else "a setting")
                check_plain(part, f"{name}.{key}" if name else str(key), levels + 1)
        else:
            for part in value:
                check_plain(part, name, levels + 1)
    elif isinstance(value, str):
        _check_word(value, name)
    elif isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        given = f"a number of {value.bit_length():,} bits" if value.bit_length() > 128 else f"{value:,}"
        raise UserError(f"{name} is {given}; numbers of at most {LARGEST_NUMBER:,} are allowed")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} is {value}; a finite number is needed")
    elif isinstance(value, float) and abs(value) > LARGEST_NUMBER:
        raise UserError(f"{name} is {value:g}; numbers of at most {LARGEST_NUMBER:,} are allowed")


def _check_word(word: str, name: str) -> None:
    if len(word) > LONGEST_WORD:
        raise UserError(f"{name} is {shown(word)}; at most {LONGEST_WORD:,} characters are allowed, not {len(word):,}")
    if any(len(part.encode("utf-8", "surrogatepass")) > LONGEST_NAME for part in word.split("/")):
        raise UserError(f"{name} is {shown(word)}; a name of at most {LONGEST_NAME} bytes is needed")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in word):
        raise UserError(f"{name} is {shown(word)}; characters that can be printed are needed")
