"""An old import path: see _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import HookMode, HookUtilBase

__all__ = ["HookMode", "HookUtilBase"]
