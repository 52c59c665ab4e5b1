"""An old import path: see compat.py."""

from torch_memory_saver.compat import HookMode, HookUtilBase

__all__ = ["HookMode", "HookUtilBase"]
