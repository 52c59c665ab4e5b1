"""Old helpers: see _compat/cpp_package.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_memory_saver.errors import InvalidStateError

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]

#: The suffix after the stem in the names of the C++ package's libraries, by release of CUDA. This package's have none.
_SUFFIXES = {"13": "_cu13", "12": "_cu12"}


def is_xpu() -> bool:
    """Whether the GPU is one of Intel's. Always False: this package does not support them."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """The shared library with that stem, in the package's directory or its parent.

    A library for the CUDA release of the loaded PyTorch takes precedence over one for every release.

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
    """Sets the environment variable inside, and restores it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
