"""Models that are made of a loaded one, named by a suffix: `NAME+clip:2048`.

The functions are from parts of the package that may import this one; they put them here when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By suffix: a function of the model and the whole number after the colon.
VARIANTS: dict[str, Callable[[Any, int], Any]] = {}
