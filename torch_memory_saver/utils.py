"""Old helpers: see _legacy/compat.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_memory_saver.errors import InvalidStateError

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]

#: What the C++ package's libraries for one release of CUDA have after the stem. Ours have nothing.
_SUFFIXES = {"13": "_cu13", "12": "_cu12"}


def is_xpu() -> bool:
    """Whether this is Intel's kind of GPU, which this package does not support."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """The shared library of that stem, in the package's directory or in the one that holds it.

    A library for the release of CUDA that PyTorch, where it is loaded, was built for comes before one for every release.

    Raises:
        InvalidStateError: There is none.
    """
    package = Path(__file__).parent
    names = [stem + suffix for suffix in (*_suffixes_of_torch(), "")]
    for directory in (package, package.parent):
        for name in names:
            for path in sorted(directory.glob(f"{name}.*so")):
                if path.name.split(".")[0] == name:
                    return path
    raise InvalidStateError(f"there is no shared library {stem!r} in {package} or {package.parent}")


def _suffixes_of_torch() -> list[str]:
    version = getattr(sys.modules.get("torch"), "version", None)
    if version is None:
        return list(_SUFFIXES.values())
    major = (getattr(version, "cuda", None) or "").split(".")[0]
    return [suffix for release, suffix in _SUFFIXES.items() if release == major]


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """The environment variable has that value inside, and is as before afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
