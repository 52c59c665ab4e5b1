"""An old import path: see _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import HookUtilModeTorch

__all__ = ["HookUtilModeTorch"]
