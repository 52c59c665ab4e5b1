"""The names of the C++ package that existing programs use, on top of this package. Nothing else in this package needs them.

``torch_memory_saver._impl._binary_wrapper.cdll`` is the C library that holds the process's state, with the functions of
compat.c under their old names. The modules entrypoint, binary_wrapper, hooks, utils and testing_utils have the old import
paths and only name what is here. Programs replace some of those names in the old modules, so they are looked up there when
they are used.

Owns no state and no lock. Any thread may call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._engine import preload
from torch_memory_saver._engine.engine import Engine
from torch_memory_saver._engine.engine import Engine as _TorchMemorySaverImpl
from torch_memory_saver._engine.hook_modes import check_hook_mode, register_hook_mode
from torch_memory_saver._torch.base import region_settings
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions, backend_checks
from torch_memory_saver.saver import TorchMemorySaver

if TYPE_CHECKING:
    from torch_memory_saver._torch.records.pool import Key

__all__ = [
    "BinaryWrapper",
    "HookMode",
    "HookUtilBase",
    "HookUtilModePreload",
    "HookUtilModeTorch",
    "TorchMemorySaver",
    "_TorchMemorySaverImpl",
    "_xpu_used_memory",
    "binary_wrapper",
    "change_env",
    "configure_subprocess",
    "empty_cache",
    "get_and_print_gpu_memory",
    "get_binary_path_from_package",
    "get_device",
    "is_xpu",
    "private_attribute_of",
    "register_hook_mode",
]

HookMode = Literal["auto", "preload", "torch"]

#: The suffix after the stem in the names of the C++ package's libraries, by release of CUDA. This package's libraries have
#: none.
_SUFFIXES = {"13": "_cu13", "12": "_cu12"}
_GIB = 1 << 30

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


class _Library(ctypes.CDLL):
    """A library of this package that also has the CUDA runtime's functions, because the C++ package's libraries were linked
    with it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            function = _runtime_function(name)
            if function is None:
                raise
        setattr(self, name, function)
        return function


def _runtime_function(name: str) -> Any:
    """Return the function of the CUDA runtime that this process has loaded, or None. Load nothing."""
    if not name.startswith("cuda"):
        return None
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/libcudart.so" in line}
    for path in (None, *sorted(paths)):  # None: the global scope
        function = getattr(ctypes.CDLL(path), name, None)
        if function is not None:
            return function
    return None


class BinaryWrapper:
    """The C library that holds the process's state.

    Args:
        path_binary: The library's path.
    """

    def __init__(self, path_binary: str) -> None:
        self.cdll = _Library(path_binary)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.cdll, name)
            function.restype = result
            function.argtypes = arguments

    def set_config(self, *, tag: str, interesting_region: bool, enable_cpu_backup: bool, **others: Any) -> None:
        """Change the settings of this thread's innermost region.

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
    """Return the wrapper of this process."""
    return BinaryWrapper(_core.library_path)


class HookUtilBase:
    """A helper that knows the path of the library that holds the process's state."""

    @staticmethod
    def create(hook_mode: str) -> HookUtilBase:
        """Return the helper of a hook mode."""
        mode = check_hook_mode(hook_mode)
        mode = preload.mode_in_force() if mode == "auto" else mode
        return HookUtilModePreload() if mode == "preload" else HookUtilModeTorch()

    def get_path_binary(self) -> str:
        """Return the library's path."""
        return _core.library_path

    def get_allocator(self) -> Any:
        """Return an allocator for torch that calls the library, or None if the hook mode has none."""
        return None


class HookUtilModePreload(HookUtilBase):
    """Hook mode "preload"."""

    def get_path_binary(self) -> str:
        return str(preload.library_path())


class HookUtilModeTorch(HookUtilBase):
    """Hook mode "torch"."""

    def get_allocator(self) -> Any:
        return layer.require().allocator()


class PoolName(NamedTuple):
    """Key under which the C++ package stores a pool. Programs pass and read it as a plain tuple."""

    tag: str
    enable_cpu_backup: bool
    enable_disk_backup: bool
    #: "" without a CPU backup.
    cpu_backup_backend: str
    device: int


class MemPools(Mapping[PoolName, Any]):
    """The idle pools of regions, by the C++ package's keys.

    Removing a pool retires it: torch releases its memory at the next emptying of the cache after the program has dropped the
    MemPool and its tensors. Pools with the same key are removed together.
    """

    def __init__(self, implementation: Engine) -> None:
        self._implementation = implementation

    def _idle(self) -> dict[PoolName, Any]:
        return {_name_of(pool.key): pool.memory_pool for pool in self._implementation._store.idle_pools.select()}

    def __getitem__(self, name: PoolName) -> Any:
        return self._idle()[name]

    def __iter__(self) -> Iterator[PoolName]:
        return iter(self._idle())

    def __len__(self) -> int:
        return len(self._idle())

    def pop(self, name: PoolName, *default: Any) -> Any:
        """Remove a pool and return its ``torch.cuda.MemPool``."""
        taken = self._take(lambda key: _name_of(key) == name)
        if not taken and not default:
            raise KeyError(name)
        return taken[-1] if taken else default[0]

    def clear(self) -> None:
        """Remove every pool."""
        self._take(lambda key: True)

    def _take(self, matches: Callable[[Key], bool]) -> list[Any]:
        torch = self._implementation._find_torch()
        return [] if torch is None else self._implementation._store.idle_pools.give_away(torch, matches)


def _name_of(key: Key) -> PoolName:
    options = key.options
    backend = {_core.BACKUP_PINNED: "pinned", _core.BACKUP_MMAP: "mmap"}.get(options.backup, "")
    return PoolName(options.tag, bool(backend), options.backup == _core.BACKUP_DISK, backend, key.device)


def _region_config(
    tag: str = DEFAULT_TAG,
    enable_cpu_backup: bool = False,
    cpu_backup_backend: str | None = None,
    enable_disk_backup: bool = False,
) -> region_settings.RegionSettings:
    """Return the settings of a region for this thread's allocations, without a pool of PyTorch."""
    return region_settings.RegionSettings(
        RegionOptions.check(
            tag,
            enable_cpu_backup=enable_cpu_backup,
            enable_disk_backup=enable_disk_backup,
            cpu_backup_backend=cpu_backup_backend,
        )
    )


def _affected_devices(tag: str | None = None) -> list[int]:
    """Return the devices that own allocations with a tag, or with any tag if `tag` is None, in ascending order."""
    return sorted({row.device for row in _core.segments() if tag is None or row.tag == tag})


def private_attribute_of(implementation: Engine, name: str) -> Any:
    """Return a private attribute of the C++ package's implementation, one of those that :class:`Engine` names."""
    if name == "_binary_wrapper":
        return binary_wrapper()
    if name == "_hook_mode":
        return implementation.hook_mode
    if name == "_hook_util":
        return HookUtilBase.create(implementation.hook_mode)
    if name == "_mem_pools":
        return MemPools(implementation)
    if name == "_with_region_config":
        return _region_config
    assert name == "_affected_devices", name
    return _affected_devices


def is_xpu() -> bool:
    """Return whether the GPU is one of Intel's. Always False: this package does not support them."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """Return the shared library with that stem, in the package's directory or its parent.

    A library for the CUDA release of the loaded PyTorch takes precedence over one for every release.

    Raises:
        InvalidStateError: There is no such library.
    """
    package = Path(__file__).parent.parent
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


def configure_subprocess() -> AbstractContextManager[None]:
    """Do the same as :meth:`torch_memory_saver.TorchMemorySaver.configure_subprocess`, in every hook mode."""
    replaced = sys.modules.get("torch_memory_saver.hooks.mode_preload")
    find = get_binary_path_from_package if replaced is None else replaced.get_binary_path_from_package
    return preload.preloading(str(find("torch_memory_saver_hook_mode_preload")))


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Set the environment variable inside, and restore it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def get_device() -> str:
    """Return the name of torch's device type."""
    return "cuda"


def empty_cache() -> None:
    """Call ``torch.cuda.empty_cache()``."""
    layer.require().torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Print and return the bytes in use on a device, by every process."""
    used = _xpu_used_memory(gpu_id)
    print(f"GPU memory: {used / _GIB:.2f} GiB ({message})", flush=True)
    return used


def _xpu_used_memory(gpu_id: int = 0) -> int:
    """Return the bytes in use on a device, by every process. The name is the C++ package's; the devices are CUDA's."""
    memory = _core.device_memory(gpu_id)
    return memory.total - memory.free


def _check_platform(backend: str) -> None:
    """Refuse what the C++ package refuses: every backend on Intel GPUs, and all but pinned memory on AMD GPUs. Only programs
    that have imported the module entrypoint expect these errors, and may have replaced ``is_xpu`` in it."""
    entrypoint = sys.modules.get("torch_memory_saver.entrypoint")
    if entrypoint is None:
        return
    if entrypoint.is_xpu():
        raise InvalidArgumentError("cpu_backup_backend is not supported on XPU")
    if backend == "mmap" and getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None):
        raise InvalidArgumentError('cpu_backup_backend "mmap" is not supported on ROCm')


backend_checks.append(_check_platform)
