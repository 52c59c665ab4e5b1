"""An old import path: see _legacy/compat.py."""

from torch_memory_saver._legacy.compat import HookMode, HookUtilBase

__all__ = ["HookMode", "HookUtilBase"]
