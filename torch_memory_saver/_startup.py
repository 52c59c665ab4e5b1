"""Code for a process that has not imported this package.

``_site/sitecustomize.py`` and ``_engine/preloaded.py`` load this file by its path, because the import of the package itself
takes time and a process may never need it. It imports only modules that every process with PyTorch has, because such an
import may come from the current working directory.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # as in typing, which takes longer to import than this file
if TYPE_CHECKING:
    import importlib.abc
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

__all__ = ["FOLDER", "REQUESTS", "SIMULATED", "OwnImports", "after_import_of_torch", "is_requested", "run_next"]

#: The folder with the ``sitecustomize`` of this package.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_site")
#: The variables that request work in a program that may never import this package.
REQUESTS = ("TMS_DEBUG", "TMS_METRICS_FILE", "TMS_RELEASE_CACHED")
#: The variable that a process on the simulated GPU has.
SIMULATED = "TMS_SIMULATED_SHARED"

#: Advice for a PyTorch whose libraries do not load on the simulated GPU.
_OTHER_PYTHON = (
    ". The simulated GPU has the libraries for the PyTorch of the Python that ran `simulate`. If that is not {0}, "
    "run `{0} -m torch_memory_saver simulate -- python ...`"
)
_NAME = "torch_memory_saver"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _AfterTorch:
    """An import finder that finds torch as the finders behind it do, and calls `callback` after torch was loaded.

    It stays until then, because many programs ask whether torch can be found before they import it.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            specification = finder.find_spec(name, path, target)
            if specification is not None:
                break
        else:
            return None
        if specification.loader is not None:
            self._loader = specification.loader
            specification.loader = self  # type: ignore[assignment]  # importlib.abc is not imported
        return specification

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec) if self._loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            advice = _OTHER_PYTHON.format(sys.executable)
            if SIMULATED in os.environ and not isinstance(error, ModuleNotFoundError) and advice not in str(error):
                error.msg = f"{error}{advice}"
            raise
        self._callback()


def after_import_of_torch(callback: Callable[[], None]) -> None:
    """Have `callback` called once, when torch has been imported."""
    sys.meta_path.insert(0, _AfterTorch(callback))


class OwnImports:
    """A context in which a program that does not know of this package imports it.

    Inside, imports of this thread ignore relative entries of ``sys.path``. Such an entry ("" under ``python -c``) names a
    folder below the current working directory, where another user may have put modules of any name. The package also becomes
    importable where it is not, as in another virtual environment.
    """

    def __init__(self) -> None:
        self._thread = get_ident()

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)
        if self._find(_NAME) is None:
            sys.path.append(_ROOT)

    def __exit__(self, *exception: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or get_ident() != self._thread:  # a module of a package comes from its folder
            return None
        specification = self._find(name)
        if specification is None:  # the next finder would look in the working directory
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return specification

    def _find(self, name: str) -> importlib.machinery.ModuleSpec | None:
        entries = [entry for entry in sys.path if os.path.isabs(entry)]
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            path = entries if finder is importlib.machinery.PathFinder else None
            specification = finder.find_spec(name, path)
            if specification is not None:
                return specification
        return None


def is_requested(environment: Mapping[str, str]) -> bool:
    """Return whether variables of `environment` request any work."""
    return any(environment.get(name, "").strip() for name in REQUESTS)


def run_next(folder: str) -> None:
    """Run the ``sitecustomize`` that Python would have found without the one in `folder`."""
    entries = [os.path.abspath(entry) for entry in sys.path]
    if folder not in entries:
        return
    # A file in an earlier entry would have been found first.
    others = sys.path[entries.index(folder) + 1 :]
    specification = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if specification is not None and specification.loader is not None:
        module = importlib.util.module_from_spec(specification)
        sys.modules["sitecustomize"] = module
        specification.loader.exec_module(module)
