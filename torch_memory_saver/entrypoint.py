"""Old import paths of the saver's classes: see _compat/cpp_package.py. Programs replace ``is_xpu`` here."""

import sys

from torch_memory_saver._compat.cpp_package import BinaryWrapper
from torch_memory_saver._engine.engine import Engine as _TorchMemorySaverImpl
from torch_memory_saver._engine.hook_modes import register_hook_mode
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.hooks.base import HookMode, HookUtilBase
from torch_memory_saver.options import backend_checks
from torch_memory_saver.saver import TorchMemorySaver
from torch_memory_saver.utils import is_xpu

__all__ = [
    "BinaryWrapper",
    "HookMode",
    "HookUtilBase",
    "TorchMemorySaver",
    "_TorchMemorySaverImpl",
    "is_xpu",
    "register_hook_mode",
]


def _check_platform(backend: str) -> None:
    """The C++ package supports no choice of a backend on Intel GPUs, and only pinned memory on AMD GPUs. Once a program has
    imported this module, other choices raise an error here as well."""
    if is_xpu():
        raise InvalidArgumentError("cpu_backup_backend is not supported on XPU")
    if backend == "mmap" and getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None):
        raise InvalidArgumentError('cpu_backup_backend "mmap" is not supported on ROCm')


backend_checks.append(_check_platform)
