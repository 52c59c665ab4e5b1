"""The preload library: its path, libraries of the C++ package beside it, how child processes load it, and which built-in
hook mode is in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from torch_memory_saver import _core
from torch_memory_saver._text import warn_once
from torch_memory_saver.errors import InvalidStateError

__all__ = [
    "LIBRARY_NAME",
    "configure_subprocess",
    "libraries_of_another_package",
    "library_path",
    "mode_in_force",
    "preload_variables",
    "preloading",
    "resolve_hook_mode",
    "warn_of_another_package",
    "warn_of_ignored_library",
]

#: File name of the library for LD_PRELOAD, which is in the parent directory of the package's directory.
LIBRARY_NAME = "torch_memory_saver_hook_mode_preload.abi3.so"
#: Matches these names and those of the C++ package, some of which also name a release of CUDA.
_LIBRARY_NAMES = "torch_memory_saver_hook_mode_*.so"
_VARIABLE = "LD_PRELOAD"
_HOW_TO_PRELOAD = (
    "start the process inside `with torch_memory_saver.configure_subprocess():`, or with the environment variable "
    f"{_VARIABLE}={{path}}"
)


def library_path() -> Path:
    """Return the path of the preload library, whether or not the file exists."""
    return Path(os.path.abspath(__file__)).parents[2] / LIBRARY_NAME


def libraries_of_another_package() -> list[Path]:
    """Return the libraries of the C++ package that lie beside this package. pip leaves them if the C++ package was copied
    there, or was not uninstalled before this package was installed. A process that has changed its user may not be able to
    list the folder any more. Then none is found."""
    try:
        return sorted([path for path in library_path().parent.glob(_LIBRARY_NAMES) if path.name != LIBRARY_NAME])
    except PermissionError:
        return []


def warn_of_another_package() -> None:
    """Warn once of libraries of the C++ package beside this package, because launchers may preload them."""
    found = libraries_of_another_package()
    if found:
        warn_once(
            "libraries of another package",
            "%s has libraries of the C++ package torch_memory_saver: %s. Programs such as slime preload these instead of "
            "the library of this package: delete them.",
            found[0].parent,
            ", ".join(path.name for path in found),
        )


def warn_of_ignored_library() -> None:
    """Warn once if this process was started with a hook library in ``LD_PRELOAD``, and that of this package is not loaded.

    The linker ignores a file that does not exist, and loads a library of another package.
    """
    ignored = _ignored_library()
    if ignored and not _core.preloaded:
        warn_once(
            "ignored preload library",
            "%s, so this process is in hook mode torch, which manages PyTorch's memory only. For hook mode preload start it "
            "with %s=%s",
            ignored,
            _VARIABLE,
            library_path(),
        )


def _ignored_library() -> str:
    """Return a clause about the hook library that ``LD_PRELOAD`` named at the start and that is not loaded, or ""."""
    entries = _preloaded_at_start().replace(":", " ").split()
    for entry in entries:
        if fnmatch(os.path.basename(entry), "torch_memory_saver*"):
            reason = "which is not the library of this package" if os.path.isfile(entry) else "and there is no such file"
            return f"{_VARIABLE} names {entry}, {reason}"
    return ""


def _preloaded_at_start() -> str:
    """Return the ``LD_PRELOAD`` that this process was started with, which configure_subprocess() does not change."""
    try:
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(value[11:]) for value in variables if value.startswith(b"LD_PRELOAD=")), "")


def configure_subprocess() -> AbstractContextManager[None]:
    """Have child processes that are started inside load the preload library. ``LD_PRELOAD`` is restored afterwards.

    Other entries of ``LD_PRELOAD`` are kept. Inside, the environment of this process is changed for all its threads.

    Raises:
        InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
    """
    return _setting(preload_variables(os.environ.get(_VARIABLE, ""), "configure_subprocess"))


def preload_variables(before: str, operation: str) -> dict[str, str]:
    """Return ``LD_PRELOAD`` with the preload library in front of the entries of the value `before`.

    Raises:
        InvalidStateError: The library is not installed, or lies at a path that ``LD_PRELOAD`` cannot name.
    """
    path = library_path()
    if not path.is_file():
        raise InvalidStateError(f"the preload library is not installed: there is no {path}", operation=operation)
    return {_VARIABLE: _in_front(str(path), before, operation)}


def _in_front(path: str, before: str, operation: str) -> str:
    if any(separator in path for separator in " :"):
        raise InvalidStateError(
            f"{_VARIABLE} cannot name {path!r}, because of the space or colon in it: install the package elsewhere",
            operation=operation,
        )
    entries = before.replace(":", " ").split()
    return before if path in entries else ":".join([path, *entries])


def preloading(path: str) -> AbstractContextManager[None]:
    """Put a library at the front of ``LD_PRELOAD`` inside, before its other entries. The variable is restored afterwards.

    Raises:
        InvalidStateError: ``LD_PRELOAD`` cannot name the path.
    """
    return _setting({_VARIABLE: _in_front(path, os.environ.get(_VARIABLE, ""), "configure_subprocess")})


@contextmanager
def _setting(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def mode_in_force() -> str:
    """Return "preload" if the preload library holds this process's state, else "torch"."""
    return "preload" if _core.preloaded else "torch"


def resolve_hook_mode(mode: str) -> str:
    """Return the mode of this process if `mode` is requested.

    "torch" in a preloaded process gives "preload": its regions use the same pools, and the library holds the state in any
    case.

    Raises:
        InvalidStateError: "preload" is requested in a process without the preload library.
    """
    if mode == "preload" and not _core.preloaded:
        ignored = _ignored_library()
        raise InvalidStateError(
            'hook_mode "preload" needs the preload library, which this process was started without'
            + (f" ({ignored}): " if ignored else ": ")
            + _HOW_TO_PRELOAD.format(path=library_path()),
            operation="initialize",
        )
    return mode_in_force()
