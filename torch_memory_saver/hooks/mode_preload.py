"""Re-exports of names of the C++ package, whose code is in _compat/cpp_package.py.

Programs replace ``get_binary_path_from_package`` here.
"""

from torch_memory_saver._compat.cpp_package import HookUtilModePreload, configure_subprocess, get_binary_path_from_package

__all__ = ["HookUtilModePreload", "configure_subprocess", "get_binary_path_from_package"]
