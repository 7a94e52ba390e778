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

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
# Modules that our configurations need. Those that import the auto configuration themselves must be complete first.
NEEDED = (
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{family}.configuration_{family}" for family in ("bloom", "falcon", "mpt")),
)
OUR_CONFIGURATIONS = ("bayesattn.models", "bayesattn.adapt.configuration")
# Modules of transformers, and those of ours that register with them when they are imported.
REGISTRATIONS = {
    **dict.fromkeys((AUTO_CONFIG, *NEEDED), OUR_CONFIGURATIONS),
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
    modules = REGISTRATIONS[name]
    if modules is OUR_CONFIGURATIONS and (
        AUTO_CONFIG not in sys.modules or any(map(_is_loading, {AUTO_CONFIG, *NEEDED} - {name}))
    ):
        return  # the module that is still loading registers the same when it is done
    for module in modules:
        try:
            import_module(module)
        except Exception as problem:  # transformers itself must be importable, whatever version it has
            warnings.warn(f"bayesattn could not register with transformers: {problem}", RuntimeWarning, stacklevel=2)
            return


def _is_loading(name: str) -> bool:
    return name in sys.modules and getattr(sys.modules[name].__spec__, "_initializing", False)


def register() -> None:
    """Register with what is imported of transformers now, and with the rest when it is imported."""
    if not any(isinstance(finder, RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegisterAfterImport())
    for name in REGISTRATIONS:
        if name in sys.modules:
            _register(name)
