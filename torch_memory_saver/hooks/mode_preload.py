"""An old import path: see _compat/cpp_package.py. Programs replace ``get_binary_path_from_package`` here."""

from contextlib import AbstractContextManager

from torch_memory_saver._compat.cpp_package import HookUtilModePreload
from torch_memory_saver._engine import preload
from torch_memory_saver.utils import get_binary_path_from_package

__all__ = ["HookUtilModePreload", "configure_subprocess", "get_binary_path_from_package"]


def configure_subprocess() -> AbstractContextManager[None]:
    """As :meth:`torch_memory_saver.TorchMemorySaver.configure_subprocess`, in every hook mode."""
    return preload.preloading(str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")))
