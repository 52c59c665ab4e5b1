"""The private corners of the C++ package that programs in the field reach into. A layer over the real thing: nothing else in
this package needs it.

``torch_memory_saver._impl._binary_wrapper.cdll`` is the C library that holds the process's state, with the functions of
compat.c under their old names.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_memory_saver import _core, preload
from torch_memory_saver.errors import InvalidStateError

__all__ = ["BinaryWrapper", "binary_wrapper", "change_env", "get_binary_path_from_package"]

# name: (result, arguments)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tms_set_interesting_region": (None, [ctypes.c_bool]),
    "tms_get_interesting_region": (ctypes.c_bool, []),
    "tms_set_current_tag": (None, [ctypes.c_char_p]),
    "tms_get_current_tag": (ctypes.c_char_p, []),
    "tms_set_enable_cpu_backup": (None, [ctypes.c_bool]),
    "tms_get_enable_cpu_backup": (ctypes.c_bool, []),
    "tms_set_cpu_backup_backend": (None, [ctypes.c_char_p]),
    "tms_get_cpu_backup_backend": (ctypes.c_char_p, []),
    "tms_set_enable_disk_backup": (None, [ctypes.c_bool]),
    "tms_get_enable_disk_backup": (ctypes.c_bool, []),
    "tms_set_disk_backup_dir": (None, [ctypes.c_char_p]),
    "tms_set_retain_cpu_backup": (None, [ctypes.c_bool]),
    "tms_get_retain_cpu_backup": (ctypes.c_bool, []),
    "set_memory_margin_bytes": (None, [ctypes.c_uint64]),
    "tms_pause": (ctypes.c_int, [ctypes.c_char_p]),
    "tms_resume": (ctypes.c_int, [ctypes.c_char_p]),
    "tms_get_cpu_backup_pointer": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint64]),
    "tms_torch_malloc": (ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]),
    "tms_torch_free": (None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]),
}


class BinaryWrapper:
    """The C library that holds the process's state.

    Args:
        path_binary: The library's path.
    """

    def __init__(self, path_binary: str) -> None:
        self.cdll = ctypes.CDLL(path_binary)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.cdll, name)
            function.restype = result
            function.argtypes = arguments

    def set_config(self, *, tag: str, interesting_region: bool, enable_cpu_backup: bool, **others: Any) -> None:
        """Changes the settings of this thread's innermost region.

        Args:
            others: ``enable_disk_backup`` (a bool) or ``cpu_backup_backend`` ("pinned" or "mmap").
        """
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if "enable_disk_backup" in others:
            self.cdll.tms_set_enable_disk_backup(bool(others["enable_disk_backup"]))
        if others.get("cpu_backup_backend") is not None:
            self.cdll.tms_set_cpu_backup_backend(others["cpu_backup_backend"].encode())


@functools.cache
def binary_wrapper() -> BinaryWrapper:
    """The wrapper of this process."""
    return BinaryWrapper(_core.library_path)


def get_binary_path_from_package(stem: str) -> Path:
    """The shared library of that stem, in the package's directory or in the one that holds it.

    Raises:
        InvalidStateError: There is none.
    """
    package = Path(os.path.abspath(__file__)).parent
    for directory in (package, package.parent):
        for path in sorted(directory.glob(f"{stem}*.so")):
            if path.name.split(".")[0] == stem:
                return path
    raise InvalidStateError(f"there is no shared library {stem!r} in {package} or {package.parent}")


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


class HookUtilBase:
    """Tells the path of the library that holds the process's state."""

    @staticmethod
    def create(hook_mode: str) -> HookUtilBase:
        """The helper of a hook mode."""
        mode = preload.check_hook_mode(hook_mode)
        mode = preload.mode_in_force() if mode == "auto" else mode
        return HookUtilModePreload() if mode == "preload" else HookUtilModeTorch()

    def get_path_binary(self) -> str:
        """The library's path."""
        return _core.library_path

    def get_allocator(self) -> Any:
        """A torch allocator over the library, or None."""
        return None


class HookUtilModePreload(HookUtilBase):
    """Hook mode "preload"."""

    def get_path_binary(self) -> str:
        return str(preload.library_path())


class HookUtilModeTorch(HookUtilBase):
    """Hook mode "torch"."""

    def get_allocator(self) -> Any:
        from torch_memory_saver import torch_layer

        return torch_layer.require().allocator()
