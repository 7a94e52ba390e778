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
    folder = _folder() / str(name)
    return str(folder if folder.is_dir() and not Path(name).exists() else name)


def _folder() -> Path:
    return Path(str(files("bayesattn"))) / "assets" / "models"
