"""The preload library: its path, how child processes load it, and which built-in hook mode is in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidStateError

__all__ = [
    "LIBRARY_NAME",
    "configure_subprocess",
    "library_path",
    "mode_in_force",
    "preload_variable",
    "preloading",
    "resolve_hook_mode",
]

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
    return preloading(_installed("configure_subprocess"))


def _installed(operation: str) -> str:
    path = library_path()
    if not path.is_file():
        raise InvalidStateError(f"the preload library is not installed: there is no {path}", operation=operation)
    return str(path)


def preload_variable(before: str, operation: str) -> str:
    """The value of ``LD_PRELOAD`` with the preload library, in front of the entries of the value `before`.

    Raises:
        InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
    """
    return _in_front(_installed(operation), before, operation)


def _in_front(path: str, before: str, operation: str) -> str:
    if any(separator in path for separator in " :"):
        raise InvalidStateError(
            f"{_VARIABLE} cannot name {path!r}, because of the space or colon in it: install the package elsewhere",
            operation=operation,
        )
    entries = before.replace(":", " ").split()
    return before if path in entries else ":".join([path, *entries])


@contextmanager
def preloading(path: str) -> Iterator[None]:
    """Inside, ``LD_PRELOAD`` begins with that library, followed by its other entries; it is restored afterwards.

    Raises:
        InvalidStateError: ``LD_PRELOAD`` cannot name the path.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = _in_front(path, before or "", "configure_subprocess")
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
