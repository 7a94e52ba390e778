"""Models that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped() -> list[str]:
    """Names of the shipped models."""
    folder = _folder()
    return sorted(path.name for path in folder.iterdir() if (path / "config.json").exists()) if folder.is_dir() else []


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
