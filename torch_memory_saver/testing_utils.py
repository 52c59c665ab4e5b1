"""Re-exports of names of the C++ package, whose code is in _compat/cpp_package.py."""

from torch_memory_saver._compat.cpp_package import (
    _xpu_used_memory,
    empty_cache,
    get_and_print_gpu_memory,
    get_device,
    is_xpu,
)

__all__ = ["_xpu_used_memory", "empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]
