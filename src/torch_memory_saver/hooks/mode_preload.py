"""An old import path: see compat.py."""

from torch_memory_saver.compat import HookUtilModePreload
from torch_memory_saver.preload import configure_subprocess

__all__ = ["HookUtilModePreload", "configure_subprocess"]
