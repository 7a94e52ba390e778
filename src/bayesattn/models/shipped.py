"""Models that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bayesattn.errors import UserError, shown


def shipped_names() -> list[str]:
    """Names of the shipped models."""
    folder = _folder()
    return sorted(path.name for path in folder.iterdir() if (path / "config.json").exists()) if folder.is_dir() else []


def shipped(name: str) -> str:
    """The folder of a model that comes with the package, for the Auto classes and `pipeline` of transformers.

    Raises:
        UserError: for another name; it lists those there are.
    """
    if not isinstance(name, str) or name not in shipped_names():
        raise UserError(
            f"no model of the name {shown(name)} comes with bayesattn; there are {', '.join(shipped_names())}"
        )
    return str(_folder() / name)


def resolve(name: str | Path) -> str:
    """The folder of a shipped model or tokenizer, or the name itself. A folder of that name in the working directory
    comes first."""
    folder = _folder()
    ours = folder.is_dir() and str(name) in [path.name for path in folder.iterdir() if path.is_dir()]
    return str(folder / name if ours and not Path(name).exists() else name)


def is_folder(name: str | Path) -> bool:
    """Whether it is a folder; False for what cannot be the name of one."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # too long, or with a character that no name can have
        return False


def _folder() -> Path:
    return Path(str(files("bayesattn"))) / "assets" / "models"
