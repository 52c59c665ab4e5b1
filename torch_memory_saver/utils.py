"""Re-exports of names of the C++ package, whose code is in _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import change_env, get_binary_path_from_package, is_xpu

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]
