"""Re-exports of names of the C++ package, whose code is in _compat/cpp_package.py.

Programs replace ``is_xpu`` here.
"""

from torch_memory_saver._compat.cpp_package import (
    BinaryWrapper,
    HookMode,
    HookUtilBase,
    TorchMemorySaver,
    _TorchMemorySaverImpl,
    is_xpu,
    register_hook_mode,
)

__all__ = [
    "BinaryWrapper",
    "HookMode",
    "HookUtilBase",
    "TorchMemorySaver",
    "_TorchMemorySaverImpl",
    "is_xpu",
    "register_hook_mode",
]
