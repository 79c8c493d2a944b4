"""Import paths of earlier versions that the docs named: each leads to the module's place of today."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "decomposable.artifact": "decomposable.network.artifact",
    "decomposable.bench": "decomposable.export",
    "decomposable.bench.measuring": "decomposable.export.measuring",
    "decomposable.forms": "decomposable.core.forms",
    "decomposable.latency": "decomposable.sizing.latency",
    "decomposable.svd": "decomposable.core.svd",
}


class _Moved(MetaPathFinder, Loader):
    """Finds the module of today under its old name: both are one object."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # importing is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def keep_old_paths() -> None:
    """Let the old names be imported. Asked first: in the folder of a package that has moved, others find its files."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
