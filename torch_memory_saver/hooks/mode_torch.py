"""An old import path: see _legacy/compat.py."""

from torch_memory_saver._legacy.compat import HookUtilModeTorch

__all__ = ["HookUtilModeTorch"]
