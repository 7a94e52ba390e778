"""Registration with transformers: its Auto classes load our models, and its models may have our attention.

`import bayesattn` should not take the seconds that transformers takes. So each registration waits until the module of
transformers that it needs has been imported, by whomever.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Modules of transformers, and those of ours that register with them when they are imported: on import, and with their
# function `register` if they have one.
REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": ("bayesattn.adapt.model_types", "bayesattn.adapt.shipped_names"),
    "transformers.models.auto.tokenization_auto": ("bayesattn.adapt.shipped_names",),
    "transformers.models.auto.modeling_auto": ("bayesattn.adapt.shipped_names",),
    "transformers.modeling_utils": ("bayesattn.adapt.backend",),
}


class RegisterAfterImport(MetaPathFinder):
    """Imports our modules after those of transformers that they register with."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where Python finds the module, with a loader that registers when it is done."""
        if fullname not in REGISTRATIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(fullname)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register(name: str) -> None:
    for module in REGISTRATIONS[name]:
        try:
            getattr(import_module(module), "register", lambda: None)()
        except Exception as problem:  # transformers itself must be importable, whatever version it has
            warnings.warn(f"bayesattn could not register with transformers: {problem}", RuntimeWarning, stacklevel=2)
            return


def register() -> None:
    """Register with what is imported of transformers now, and with the rest when it is imported."""
    if not any(isinstance(finder, RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegisterAfterImport())
    for name in REGISTRATIONS:
        if name in sys.modules:
            _register(name)
