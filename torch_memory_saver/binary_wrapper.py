"""An old import path: see _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import BinaryWrapper

__all__ = ["BinaryWrapper"]
