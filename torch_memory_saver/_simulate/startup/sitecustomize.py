"""Python imports this module at startup, because ``simulate`` puts its folder at the front of ``PYTHONPATH``.

After the import of torch, it installs the operators of the simulated GPU. A ``sitecustomize`` of the user runs as it would
without this one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as the other finders do, and installs the operators after torch was loaded."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        specification = importlib.util.find_spec(name)
        if specification is not None and specification.loader is not None:
            self._loader = specification.loader
            specification.loader = self
        return specification

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec) if self._loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if importlib.util.find_spec("torch_memory_saver") is None:
            sys.path.append(_ROOT)
        from torch_memory_saver._simulate.operators.install import install

        install()


def _run_the_users() -> None:
    """Runs the sitecustomize that Python would have found without this folder."""
    others = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    specification = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if specification is not None and specification.loader is not None:
        module = importlib.util.module_from_spec(specification)
        sys.modules["sitecustomize"] = module
        specification.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTorch())
_run_the_users()
