"""The preload library: its path, how child processes load it, and which built-in hook mode is in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidStateError

__all__ = ["LIBRARY_NAME", "configure_subprocess", "library_path", "mode_in_force", "preloading", "resolve_hook_mode"]

#: File name of the library for LD_PRELOAD; it lies in the directory that holds the package's directory.
LIBRARY_NAME = "torch_memory_saver_hook_mode_preload.abi3.so"

_VARIABLE = "LD_PRELOAD"
_HOW_TO_PRELOAD = (
    "start the process inside `with torch_memory_saver.configure_subprocess():`, or with the environment variable "
    f"{_VARIABLE}={{path}}"
)


def library_path() -> Path:
    """The preload library's path, whether or not the file is there."""
    return Path(os.path.abspath(__file__)).parents[2] / LIBRARY_NAME


def configure_subprocess() -> AbstractContextManager[None]:
    """Child processes started inside load the preload library; ``LD_PRELOAD`` is restored afterwards.

    Other entries of ``LD_PRELOAD`` are kept. Changes the environment of this process meanwhile, for all its threads.

    Raises:
        InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
    """
    path = library_path()
    if not path.is_file():
        raise InvalidStateError(
            f"the preload library is not installed: there is no {path}", operation="configure_subprocess"
        )
    return preloading(str(path))


@contextmanager
def preloading(path: str) -> Iterator[None]:
    """Inside, ``LD_PRELOAD`` begins with that library, followed by its other entries; it is restored afterwards.

    Raises:
        InvalidStateError: ``LD_PRELOAD`` cannot name the path.
    """
    if any(separator in path for separator in " :"):
        raise InvalidStateError(
            f"{_VARIABLE} cannot name {path!r}, because of the space or colon in it: install the package elsewhere",
            operation="configure_subprocess",
        )
    before = os.environ.get(_VARIABLE)
    entries = (before or "").replace(":", " ").split()
    if path not in entries:
        os.environ[_VARIABLE] = ":".join([path, *entries])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def mode_in_force() -> str:
    """ "preload" where the preload library holds this process's state, else "torch"."""
    return "preload" if _core.preloaded else "torch"


def resolve_hook_mode(mode: str) -> str:
    """The mode of this process if `mode` is requested.

    "torch" in a preloaded process gives "preload": its regions use the same pools, and the library holds the state in any
    case.

    Raises:
        InvalidStateError: "preload" is requested in a process without the preload library.
    """
    if mode == "preload" and not _core.preloaded:
        raise InvalidStateError(
            'hook_mode "preload" needs the preload library, which this process was started without: '
            + _HOW_TO_PRELOAD.format(path=library_path()),
            operation="initialize",
        )
    return mode_in_force()
