"""Re-exports of names of the C++ package, whose code is in _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import HookUtilModeTorch

__all__ = ["HookUtilModeTorch"]
